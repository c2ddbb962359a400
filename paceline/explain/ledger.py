"""The account of a step: each second of it is charged to one cause, once.

An account is a part of the typical worker's step (`parts`), or the pauses between steps. Causes
charge accounts in the order of their priorities; no cause gets a second that another one has. What
is left at the end is computing that the step needs, or seconds that no resource explains.
"""

from collections.abc import Mapping

from paceline.explain.findings import CauseName

COMPUTE, INPUT, WAIT, OVERHEAD, PAUSES = "compute", "input", "wait", "overhead", "pauses"
BANDWIDTH, UPLINK = "exchange: bandwidth", "exchange: uplink"
LATENCY, QUEUEING = "exchange: latency", "exchange: server queueing"
TRANSPORT = "exchange: transport"
EXCHANGE = (TRANSPORT, BANDWIDTH, UPLINK, QUEUEING, LATENCY)
FIRST_STEPS = "first steps"


class StepAccount:
    """Seconds per step in each account, and the causes to which they are charged."""

    def __init__(self, accounts: Mapping[str, float]) -> None:
        self.left = {name: max(0.0, seconds) for name, seconds in accounts.items()}
        self.charged: dict[CauseName, dict[str, float]] = {}

    def charge(self, cause: CauseName, seconds: float, *accounts: str) -> float:
        """Charge up to `seconds` to a cause, from these accounts in turn; return what was left."""
        charged = 0.0
        for account in accounts:
            taken = min(max(0.0, seconds - charged), self.left.get(account, 0.0))
            if taken > 0:
                self.left[account] -= taken
                own = self.charged.setdefault(cause, {})
                own[account] = own.get(account, 0.0) + taken
                charged += taken
        return charged

    def charge_all(self, cause: CauseName, *accounts: str) -> float:
        """Charge all that is left in these accounts to a cause."""
        return self.charge(cause, sum(self.left.get(name, 0.0) for name in accounts), *accounts)

    def seconds(self, *causes: CauseName) -> float:
        """Seconds per step that are charged to these causes."""
        return sum(sum(self.charged.get(cause, {}).values()) for cause in causes)

    def charged_to(self, account: str) -> float:
        """Seconds of an account that some cause has."""
        return sum(own.get(account, 0.0) for own in self.charged.values())
