"""One step taken apart. The parts sum to the step, and what they cost to the step minus the ideal.

The step is the mean step of the worker in the middle. Exposed exchange is divided by what is known
of the links: the time a worker's own link was busy is *bandwidth*; what a server's link or process
was busy beyond that is *server queueing*; rounds times delay is *latency*; the rest is *transport*
(copies, protocol, the CPU).
"""

from paceline import spec
from paceline.explain import limits
from paceline.explain.facts import Facts, WorkerFacts
from paceline.explain.findings import Part
from paceline.units import format_bandwidth, format_bytes, format_seconds

NAMES = (
    "compute",
    "input",
    "wait",
    "exchange: bandwidth",
    "exchange: latency",
    "exchange: server queueing",
    "exchange: transport",
    "overhead",
)
"""In the order in which they are shown."""


def parts(facts: Facts, baseline: Facts | None = None) -> tuple[Part, ...]:
    """The typical worker's step in parts; beside a baseline, each part against its share there."""
    typical, seconds, counters = facts.typical, *_divide(facts)
    ideal = dict.fromkeys(NAMES, 0.0)
    if baseline is None:
        ideal["compute"] = seconds["compute"]
    else:
        scale = typical.samples / baseline.typical.samples
        ideal |= {name: scale * part for name, part in _divide(baseline)[0].items()}
    return tuple(
        Part(
            name=name,
            seconds=seconds[name],
            fraction=seconds[name] / typical.step_seconds,
            lost_seconds=seconds[name] - ideal[name],
            counter=counters[name],
        )
        for name in NAMES
        if seconds[name] or ideal[name]
    )


def _divide(facts: Facts) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each part, and the counter that proves it."""
    typical = facts.typical
    phases, name = typical.phases, typical.name
    seconds = dict.fromkeys(NAMES, 0.0)
    counters = {
        "compute": f"{name}: forward {format_seconds(phases['forward'])}, "
        f"backward {format_seconds(phases['backward'])}, "
        f"update {format_seconds(phases['update'])}",
        "input": f"{name}: input",
        "wait": _last_in_words(facts),
        "overhead": f"{name}: step minus its phases",
    }
    seconds["compute"] = typical.compute_seconds
    seconds["input"], seconds["wait"] = phases["input"], phases["wait"]
    seconds["overhead"] = typical.overhead_seconds
    if not facts.exchanges:
        # One worker has nobody to exchange with: what follows its last gradient is bookkeeping.
        seconds["overhead"] += phases["exchange_exposed"]
        return seconds, counters
    for part, (amount, counter) in _exchange(facts, typical).items():
        seconds[part], counters[part] = amount, counter
    return seconds, counters


def _exchange(facts: Facts, typical: WorkerFacts) -> dict[str, tuple[float, str]]:
    """Exposed exchange, divided by what is needed for it.

    Needs may overlap with compute and with each other. Where they come to more than what was
    exposed, each is charged with its share; what they leave unexplained is transport.
    """
    exposed = typical.phases["exchange_exposed"]
    needs = {
        "exchange: bandwidth": _bandwidth(facts),
        "exchange: latency": _latency(facts, typical),
        "exchange: server queueing": _queueing(facts),
    }
    total = sum(max(0.0, need) for need, _ in needs.values())
    scale = min(1.0, exposed / total) if total > 0 else 0.0
    divided = {name: (scale * max(0.0, need), why) for name, (need, why) in needs.items()}
    left = max(0.0, exposed - sum(seconds for seconds, _ in divided.values()))
    why = "links unknown" if not facts.links else "what links and servers do not account for"
    counter = f"{typical.name}: exchange_exposed; {why}"
    return {**divided, "exchange: transport": (left, counter)}


def _bandwidth(facts: Facts) -> tuple[float, str]:
    """Time the busiest worker's link was busy: in a synchronous exchange all wait for it."""
    found = limits.link_seconds(facts, "worker")
    if found is None:
        return 0.0, ""
    name, seconds = found
    size = format_bytes(facts.traffic[name].busier_bytes)
    cable = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
    busy = f"its {cable} link is busy {format_seconds(seconds)}"
    return seconds, f"{name}: {size} per step and direction; {busy}"


def _latency(facts: Facts, typical: WorkerFacts) -> tuple[float, str]:
    if typical.name not in facts.links:
        return 0.0, ""
    delay = facts.links[typical.name].latency_seconds
    workers = facts.summary.workers
    # A frame crosses its sender's and its receiver's cable.
    rounds = 2 * (workers - 1) if isinstance(facts.architecture, spec.Ring) else 2
    counter = f"{rounds} messages one after the other, {format_seconds(delay)} a cable"
    return 2 * delay * rounds, counter


def _queueing(facts: Facts) -> tuple[float, str]:
    """What the busiest server, or its link, needed beyond a worker's own link."""
    workers = limits.link_seconds(facts, "worker")
    own = workers[1] if workers else 0.0
    candidates = []
    servers = limits.link_seconds(facts, "server")
    if servers is not None:
        name, seconds = servers
        size = format_bytes(facts.traffic[name].busier_bytes)
        counter = f"{name}: {size} per step; its link is busy {format_seconds(seconds)}"
        candidates.append((seconds - own, counter))
    serving = limits.serving_seconds(facts)
    if serving is not None:
        candidates.append((serving[1] - own, serving[2]))
    return max(candidates, default=(0.0, ""))


def _last_in_words(facts: Facts) -> str:
    last = max(facts.workers, key=lambda worker: worker.last_fraction)
    if not last.last_fraction:
        return f"{facts.typical.name}: wait"
    return f"ready_seconds: {last.name} was last in {last.last_fraction:.0%} of the steps"
