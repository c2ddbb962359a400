"""What an explanation holds. Plain data: the command prints it, the page shows it."""

from typing import Literal

import msgspec

CauseName = Literal[
    "slow-link",
    "latency",
    "transport",
    "server",
    "slow-worker",
    "jitter",
    "input",
    "small-batch",
    "compute",
    "overhead",
]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all findings; what is not known is left out of the JSON."""


class Part(Finding, frozen=True, kw_only=True):
    """One part of a step."""

    name: str
    seconds: float
    fraction: float
    """Of the whole step."""

    lost_seconds: float
    """What it costs beyond the ideal; these sum to the step minus the ideal."""

    counter: str
    """The figure in the record that proves it."""


class Late(Finding, frozen=True, kw_only=True):
    """The worker the others wait for."""

    worker: str
    reason: Literal["input", "compute", "link", "overhead"]
    seconds: float
    """How much later than the typical worker its gradients are ready, on average."""

    last_fraction: float
    """Share of the steps in which it was the last."""

    factor: float | None = None
    """Its time for the reason over the typical worker's."""


class Resource(Finding, frozen=True, kw_only=True):
    """Something every step needs for a while; no step is shorter than its busiest resource."""

    name: str
    seconds: float
    counter: str


class Cause(Finding, frozen=True, kw_only=True):
    """A loss worth a sentence."""

    name: CauseName
    seconds: float
    fraction: float
    text: str


class Action(Finding, frozen=True, kw_only=True):
    """What to do next."""

    text: str
    gain_fraction: float | None = None
    """By how much throughput would rise, from the record; left out where it cannot be computed."""


class Explanation(Finding, frozen=True, kw_only=True):
    """Where the time of a run went."""

    run: str
    architecture: str
    workers: int
    worker: str
    """Whose step is taken apart: the one in the middle, or the faster of two."""

    steps: int
    step_seconds: float
    ideal_seconds: float
    ideal: str
    """What the ideal is made of."""

    healthy: bool
    verdict: str
    parts: tuple[Part, ...]
    causes: tuple[Cause, ...]
    """Losses worth a sentence, the largest first; empty for a healthy run."""

    resources: tuple[Resource, ...]
    """The longest first: the one that binds."""

    limit_seconds: float
    """No step of this architecture on these resources is shorter."""

    actions: tuple[Action, ...]
    late: Late | None = None
    baseline: str = ""
