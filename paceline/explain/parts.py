"""One step taken apart. The parts sum to the step, and what they cost to the step minus the ideal.

The step is the mean step of the worker in the middle. Exposed exchange is charged to what binds it:
to the servers where one of them, or its link, is needed longer than any worker's link (*server
queueing*); else to the links (*bandwidth*). Delays that follow one another are *latency*, and so is
TCP's slow start on links that have such delays; the rest is *transport* (copies, protocol, CPU).
"""

from paceline.explain import limits
from paceline.explain.facts import Facts
from paceline.explain.findings import Part
from paceline.explain.needs import Needs, needs_of, rounds
from paceline.units import format_bandwidth, format_bytes, format_seconds

NAMES = (
    "compute",
    "input",
    "wait",
    "exchange: bandwidth",
    "exchange: uplink",
    "exchange: latency",
    "exchange: server queueing",
    "exchange: transport",
    "overhead",
)
"""In the order in which they are shown."""

OVERLAP_FRACTION = 0.4
"""Share of backward behind which bytes travel where delays do not keep them from it: 0.44 of it in
a ring of two hosts at 200 Mbit/s, 0.66 where workers serve."""

SERVER_BINDS = 1.15
"""A server is what binds when it is needed this much longer than any worker's link."""

NOTHING = 1e-9
"""Seconds that rounding leaves where there is nothing."""

Divided = dict[str, tuple[float, str]]
"""Part -> seconds, and the counter that proves them."""


def parts(facts: Facts, baseline: Facts | None = None) -> tuple[Part, ...]:
    """The typical worker's step in parts; beside a baseline, each part against its share there."""
    typical, divided = facts.typical, _divide(facts)
    divided = {n: part if part[0] > NOTHING else (0.0, "") for n, part in divided.items()}
    ideal = dict.fromkeys(NAMES, 0.0)
    if baseline is None:
        ideal["compute"] = divided["compute"][0]
    else:
        scale = typical.samples / baseline.typical.samples
        ideal |= {name: scale * seconds for name, (seconds, _) in _divide(baseline).items()}
    return tuple(
        Part(
            name=name,
            seconds=divided[name][0],
            fraction=divided[name][0] / (typical.step_seconds + typical.paused_seconds),
            lost_seconds=divided[name][0] - ideal[name],
            counter=divided[name][1],
        )
        for name in NAMES
        if divided[name][0] or ideal[name]
    )


def server_binds(needs: Needs) -> bool:
    """Whether the servers, and not the workers' links, are what an exchange waits for."""
    return needs.of_role("server") > SERVER_BINDS * needs.of_role("worker")


def uplink_binds(needs: Needs) -> bool:
    """Whether an exchange waits for the uplink of a rack, and for no cable of a host or server."""
    uplink = max(needs.uplinks.values(), default=0.0)
    return uplink > max(needs.of_role("server"), needs.of_role("worker"))


def busiest_server(needs: Needs) -> str:
    return max(
        (seconds, name)
        for wire in (needs.out, needs.into, needs.serving)
        for name, seconds in wire.items()
        if name.startswith("server")
    )[1]


def busiest_worker_link(needs: Needs) -> str:
    return max(
        (seconds, name)
        for wire in (needs.out, needs.into)
        for name, seconds in wire.items()
        if not name.startswith("server")  # workers of an observed job are called ranks
    )[1]


def _divide(facts: Facts) -> Divided:
    """Seconds of each part, and the counter that proves it."""
    typical = facts.typical
    phases, name = typical.phases, typical.name
    computed = f"{name}: forward {format_seconds(phases['forward'])}, backward "
    computed += f"{format_seconds(phases['backward'])}, update {format_seconds(phases['update'])}"
    divided: Divided = dict.fromkeys(NAMES, (0.0, ""))
    divided |= {
        "compute": (typical.compute_seconds, computed),
        "input": (phases["input"], f"{name}: input"),
        "wait": (phases["wait"], _last_in_words(facts)),
        "overhead": (typical.overhead_seconds, f"{name}: step minus its phases"),
    }
    if not facts.exchanges:
        # One worker has nobody to exchange with: what follows its last gradient is bookkeeping.
        after = typical.overhead_seconds + phases["exchange_exposed"]
        divided["overhead"] = after, divided["overhead"][1]
        return divided
    return divided | _exchange(facts, needs_of(facts))


def _exchange(facts: Facts, needs: Needs) -> Divided:
    """Exposed exchange, charged to what it waits for; what is hidden, is so in equal parts."""
    # What bytes alone would leave open; delays are charged with the rest, up to what they can cost.
    backward = facts.typical.phases["backward"]
    bytes_alone = max(0.0, needs.busiest - OVERLAP_FRACTION * backward)
    open_to_delay = max(0.0, needs.exposed - bytes_alone)
    delay = min(open_to_delay, needs.latency + needs.slow_start) if needs.latency else 0.0
    binding = min(needs.busiest, needs.exposed - delay)
    left = max(0.0, needs.exposed - binding - delay)
    crossed = f"{rounds(facts) or 0:g} messages one after the other"
    proof = f"{crossed}, {format_seconds(needs.latency)} in all; TCP's slow start"
    why = "links unknown" if not facts.links else "what links and servers do not account for"
    if rounds(facts) is None and facts.links:
        name = facts.summary.architecture
        why = f"how many messages of {name} follow one another is unknown, and so what delays cost"
    if facts.shares_memory:
        why = "through shared memory"
    divided: Divided = {
        "exchange: latency": (delay, proof),
        "exchange: transport": (left, f"{facts.typical.name}: exchange_exposed; {why}"),
    }
    if needs.busiest > 0:
        name = "exchange: server queueing" if server_binds(needs) else "exchange: bandwidth"
        if uplink_binds(needs):
            name = "exchange: uplink"
        divided[name] = binding, _binding_in_words(facts, needs)
    return divided


def _binding_in_words(facts: Facts, needs: Needs) -> str:
    if uplink_binds(needs) and facts.uplink is not None:
        rack, seconds = max(needs.uplinks.items(), key=lambda pair: pair[1])
        rate = format_bandwidth(facts.uplink.bandwidth_bits_per_second)
        return f"uplink of {rack}: its {rate} cable is busy {format_seconds(seconds)}"
    binds = server_binds(needs)
    name = busiest_server(needs) if binds else busiest_worker_link(needs)
    wire = max(needs.out.get(name, 0.0), needs.into.get(name, 0.0))
    work = needs.serving.get(name, 0.0)
    if work > wire:
        return f"{name}: CPU, {limits.busy(facts, work):.0%} of the time"
    size = format_bytes(facts.traffic[name].busier_bytes)
    cable = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
    busy = f"its {cable} link is busy {format_seconds(wire)}"
    return f"{name}: {size} per step and direction; {busy}"


def _last_in_words(facts: Facts) -> str:
    last = max(facts.workers, key=lambda worker: worker.last_fraction)
    if not last.last_fraction:
        return f"{facts.typical.name}: wait"
    return f"ready_seconds: {last.name} was last in {last.last_fraction:.0%} of the steps"
