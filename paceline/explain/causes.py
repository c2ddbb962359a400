"""Which losses are worth a sentence, and how they arose. Rules over facts and parts; no prose."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline import spec
from paceline.explain import learning as learn
from paceline.explain.facts import Facts, WorkerFacts, own_seconds
from paceline.explain.findings import CauseName, Late, Learning, Part
from paceline.explain.machine import Shortage, own_cores, short_of_memory
from paceline.explain.needs import Needs
from paceline.explain.spans import Slowed
from paceline.explain.unsteady import Unsteady
from paceline.record.wall import FIRST_STEPS, START_UP, TEARDOWN

WORTH_FRACTION = 0.15
"""A loss below this share of the step is not named."""

HEALTHY_FRACTION = 0.20
"""All losses together below this share of the step: nothing to mend."""

LOW_EFFICIENCY = 0.8
"""Beside a baseline, a run that scales worse than this is never healthy."""

SCRIPT_SECONDS = 0.005
"""Bookkeeping takes less per step; what takes longer is something the script does."""

SLOW_CABLE = 0.8
"""A cable below this share of the typical one's rate is a slow cable."""

FIRST_STEPS_FRACTION, FIRST_STEPS_SECONDS = 0.3, 2.0
"""First steps that take more of the training than this, beyond what later ones take, are named."""

FAR_FACTOR = 2.0
"""A cable with more than this many times the usual delay leads far away."""

SMALL_PIECE_BYTES = 64 * 1024
"""Pieces below this cost more to handle than to send."""

LATE_WORK_FRACTION = 0.4
"""Gradients that came too late for their step, beyond which a quorum is too small. Less is what a
quorum is for."""

BULK_BYTES = 16e6
"""Gradients of a step that are many: a larger batch makes them rarer, not fewer."""

FIXED_COMPUTE, FIXED_OF_FEW = 0.4, 0.8
"""Share of forward and backward that may not grow with the batch, on real cores: small matrices
use them badly, those of a few samples hardly at all."""

FEW_SAMPLES = 8
"""Fewer fill no core's registers."""

SHARED_CORES = 0.7
"""Members that use more of the machine's cores than this have to share them."""

CORE_JITTER = 2.0
"""Who waits for a core by chance is last by chance: by about this many times the mean wait."""

JUDGED_STEPS = 10
"""A run that failed after fewer says nothing about its speed."""

NOT_FIXED: tuple[CauseName, ...] = (
    "slow-link",
    "slow-cable",
    "server",
    "latency",
    "cores",
    "cpu-taken",
    "readers",
    "compression",
)
"""Causes beside which a batch is not called too small for the rest."""

BY_PART: dict[str, CauseName] = {
    "input": "input",
    "exchange: bandwidth": "slow-link",
    "exchange: latency": "latency",
    "exchange: server queueing": "server",
    "exchange: transport": "transport",
    "overhead": "overhead",
}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A cause and its cost per step."""

    name: CauseName
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a run when its causes are named."""

    facts: Facts
    needs: Needs
    parts: Sequence[Part]
    late: Late | None
    shortage: Shortage | None
    unsteady: Unsteady | None = None
    slowed: tuple[Slowed, ...] = ()
    """Parts of the run that were slow, where nothing but their length is known; the worst first."""

    learning: Learning | None = None
    baseline: Facts | None = None
    efficiency: float | None = None
    failure: str = ""
    lost: str = ""
    inside: "tuple[Inside, ...]" = ()


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The slow steps of a run that was slow for a part of it, explained by themselves."""

    slow: Slowed
    evidence: Evidence
    loss: Loss
    """What those steps lose, and the others do not."""

    steps_fraction: float
    """Their share of all steps."""


def causes(evidence: Evidence) -> list[Loss]:
    """What is wrong, the worst first; empty when the run is healthy."""
    facts = evidence.facts
    first: list[CauseName] = []
    if evidence.failure:
        first.append("failed")
    if evidence.lost:
        first.append("lost")
    wrong = learn.troubles(facts, evidence.learning)
    first += [name for name in wrong if learn.is_certain(facts, name, wrong)]
    if short_of_memory(facts):
        first.append("memory")
    doubtful = [Loss(name=name, seconds=0.0) for name in wrong if name not in first]
    judged = not evidence.failure or facts.typical.steps >= JUDGED_STEPS
    slow = _losses(evidence) if judged else []
    whole = facts.typical.step_seconds + facts.typical.paused_seconds
    if slow and slow[0].seconds < WORTH_FRACTION * whole:
        slow, doubtful = doubtful, slow
    return [*(Loss(name=name, seconds=0.0) for name in first), *slow, *doubtful]


def _losses(evidence: Evidence) -> list[Loss]:
    facts = evidence.facts
    whole = facts.typical.step_seconds + facts.typical.paused_seconds
    found = step_losses(evidence)
    found.append(Loss(name="pauses", seconds=facts.typical.paused_seconds))
    early = first_steps_excess(facts) / max(facts.typical.steps, 1)
    found.append(Loss(name="first-steps", seconds=early))
    found = sorted((loss for loss in found if loss.seconds > 0), key=lambda loss: -loss.seconds)
    worth = [loss for loss in found if loss.seconds >= WORTH_FRACTION * whole]
    slow = evidence.efficiency is not None and evidence.efficiency < LOW_EFFICIENCY
    lost = sum(part.lost_seconds for part in evidence.parts)
    if max(lost, sum(loss.seconds for loss in found)) < HEALTHY_FRACTION * whole and not slow:
        worth, found = [], []
    return worth or found[:1]


def step_losses(evidence: Evidence) -> list[Loss]:
    facts, late = evidence.facts, evidence.late
    lost = {part.name: part.lost_seconds for part in evidence.parts}
    found = {BY_PART[name]: seconds for name, seconds in lost.items() if name in BY_PART}
    found[_cause_of_wait(facts, late)] = lost.get("wait", 0.0)
    _split_link(evidence, found)
    _blame_small_pieces(facts, found)
    _add_compression(facts, found)
    _add_compute(evidence, found, lost.get("compute", 0.0))
    _gather_fixed_costs(facts, found)
    _add_inside(evidence.inside, found)
    for slow in (evidence.unsteady, *evidence.slowed):
        _add_unsteady(slow, found)
    found["late-work"] = _late_work_seconds(facts)
    return [Loss(name=name, seconds=seconds) for name, seconds in found.items()]


def slow_cable(facts: Facts, needs: Needs) -> str:
    """The member whose cable is slower than the others' and binds the exchange; empty if none."""
    if len(facts.links) < 2 or not needs.out:
        return ""
    rates = sorted(link.bandwidth_bits_per_second for link in facts.links.values())
    name = max(needs.out, key=lambda m: max(needs.out[m], needs.into[m]))
    own = facts.links[name].bandwidth_bits_per_second
    return name if own < SLOW_CABLE * rates[len(rates) // 2] else ""


def far_away(facts: Facts) -> str:
    """The one member whose cable has a delay that the others' have not; empty if none."""
    delays = {name: link.latency_seconds for name, link in facts.links.items()}
    far = [name for name, own in delays.items() if own > FAR_FACTOR * median(delays.values())]
    return far[0] if len(far) == 1 else ""


def small_pieces(kind: spec.Architecture) -> int | None:
    """Bytes of the pieces that gradients travel in, where somebody made them small."""
    size = kind.piece_bytes
    return size if size is not None and size < SMALL_PIECE_BYTES else None


def first_steps_excess(facts: Facts) -> float:
    """Seconds that the first steps took beyond what later ones take; 0 where not worth a word."""
    wall = facts.summary.wall_seconds
    if wall is None or FIRST_STEPS not in wall:
        return 0.0
    count = facts.experiment.measurement.warmup_steps
    excess = wall[FIRST_STEPS] - count * facts.typical.step_seconds
    training = sum(s for what, s in wall.items() if what not in (START_UP, TEARDOWN))
    large = excess > FIRST_STEPS_FRACTION * training and excess > FIRST_STEPS_SECONDS
    return excess if large else 0.0


def fixed_seconds(worker: WorkerFacts, transport_seconds: float) -> float:
    """What a step costs however few samples it has, links and other members aside."""
    return worker.phases["update"] + worker.overhead_seconds + transport_seconds


def compression_seconds(facts: Facts) -> float:
    """What encoding costs the typical worker in each step."""
    count = max((worker.steps for worker in facts.workers), default=0)
    warmup = facts.experiment.measurement.warmup_steps
    found = [
        seconds / (count + warmup)
        for member in facts.members
        if isinstance(seconds := member.counters.get("compression_seconds"), float)
        and member.name == facts.typical.name
    ]
    dilation = facts.experiment.cluster.dilation if facts.experiment.engine == "tunnel" else 1.0
    return max(found, default=0.0) / dilation


def _cause_of_wait(facts: Facts, late: Late | None) -> CauseName:
    if facts.architecture.staging is not None:  # stages wait for each other by design
        return "bubble"
    if late is None:
        return "jitter"
    return "slow-cable" if late.reason == "link" else "slow-worker"


def _split_link(evidence: Evidence, found: dict[CauseName, float]) -> None:
    """One cable slower than the rest is not a network too slow for the exchange."""
    cable = slow_cable(evidence.facts, evidence.needs)
    if cable:
        name: CauseName = "server" if cable.startswith("server") else "slow-link"
        found["slow-cable"] = found.get("slow-cable", 0.0) + found.pop(name, 0.0)
    elif found.get("slow-cable") is not None:  # late by its exchange, with a cable like the others'
        found["slow-link"] = found.get("slow-link", 0.0) + found.pop("slow-cable")


def _blame_small_pieces(facts: Facts, found: dict[CauseName, float]) -> None:
    """A server that only handles messages is not short of servers."""
    if small_pieces(facts.architecture) is not None:
        found["transport"] = found.get("transport", 0.0) + found.pop("server", 0.0)


def _add_compression(facts: Facts, found: dict[CauseName, float]) -> None:
    """Encoding is what remains of an exchange when the bytes are few; what is hidden costs none."""
    seconds = min(compression_seconds(facts), facts.typical.phases["exchange_exposed"])
    if seconds > 0:
        found["compression"] = seconds
        exposed: tuple[CauseName, ...] = ("transport", "slow-link", "slow-cable", "server")
        for name in exposed:  # no second of the exchange counts twice
            taken = min(seconds, found.get(name, 0.0))
            found[name], seconds = found.get(name, 0.0) - taken, seconds - taken


def _add_compute(evidence: Evidence, found: dict[CauseName, float], lost: float) -> None:
    """Compute that takes longer than it should: too little room, or too few samples at once."""
    facts, baseline, short = evidence.facts, evidence.baseline, evidence.shortage
    if short is not None:
        # What waits for a core is computing, exchanging and being last alike: it counts once.
        by_chance = min(found.get("jitter", 0.0), CORE_JITTER * short.seconds)
        found["jitter"] = found.get("jitter", 0.0) - by_chance
        longer = min(lost, short.seconds)
        found[short.name] = max(short.seconds, longer, by_chance)
        if short.name == "readers":  # samples come late, now here and now there, for want of cores
            found["readers"] += found.pop("input", 0.0) + found.pop("jitter", 0.0)
        if "transport" in found:
            found["transport"] = max(0.0, found["transport"] - max(0.0, short.seconds - lost))
        lost -= longer
    if baseline is not None:
        smaller = facts.typical.samples < 0.75 * baseline.typical.samples
        alone: CauseName = "cores" if has_fewer_cores(evidence) else "compute"
        name: CauseName = "small-batch" if smaller else alone
        found[name] = found.get(name, 0.0) + lost


def threads_each(facts: Facts) -> int:
    """Threads with which a worker computes on cores of this machine; 0 where it does not."""
    if not facts.computes_here or not facts.cores:
        return 0
    return facts.experiment.cluster.threads or max(1, facts.cores // len(facts.workers))


def has_fewer_cores(evidence: Evidence) -> bool:
    """Whether workers share cores that each of the baseline's had more of."""
    facts, baseline = evidence.facts, evidence.baseline
    if baseline is None or facts.cores != baseline.cores:
        return False
    if len(facts.traffic) < len(facts.members) or own_cores(facts) < SHARED_CORES * facts.cores:
        return False
    return 0 < threads_each(facts) < threads_each(baseline)


def _gather_fixed_costs(facts: Facts, found: dict[CauseName, float]) -> None:
    """Costs that do not grow with the batch, above those that do: the batch is too small.

    A pause that the script makes in every step is fixed too, but it is the script's.
    """
    typical = facts.typical
    if not knows_samples(facts):
        return
    if typical.overhead_seconds > SCRIPT_SECONDS or small_pieces(facts.architecture) is not None:
        return
    per_sample = own_seconds(typical) - typical.phases["update"] - typical.overhead_seconds
    if facts.computes_here and typical.samples < FEW_SAMPLES:
        per_sample *= 1 - FIXED_OF_FEW
    fixed = fixed_seconds(typical, found.get("transport", 0.0))
    if _moves_much(facts) and found.get("transport", 0.0) > fixed / 2:
        return
    if fixed <= per_sample or fixed <= sum(found.get(name, 0.0) for name in NOT_FIXED):
        return
    gathered: tuple[CauseName, ...] = ("transport", "overhead", "small-batch")
    found["small-batch"] = sum(found.pop(name, 0.0) for name in gathered)
    found["small-batch"] += typical.phases["update"]


def knows_samples(facts: Facts) -> bool:
    """Whether the samples of a step were counted; the traces of an imported job hold none."""
    seen = [member.counters.get("observed") for member in facts.members]
    return not any(isinstance(one, dict) and one.get("samples") == "unknown" for one in seen)


def _moves_much(facts: Facts) -> bool:
    """Whether moving gradients is work, and not what each message costs."""
    traffic = facts.traffic.get(facts.typical.name)
    return traffic is not None and traffic.busier_bytes > BULK_BYTES


def late_fraction(facts: Facts) -> float:
    """Share of all gradients that came after their step had closed (`quorum`)."""
    late = all_of_them = 0
    for member in facts.members:
        for what in ("late_gradients", "staleness"):
            by_worker = member.counters.get(what)
            for count in by_worker.values() if isinstance(by_worker, dict) else ():
                if isinstance(count, dict):
                    all_of_them += sum(count.values())
                else:
                    late += count
    return late / all_of_them if all_of_them else 0.0


def _late_work_seconds(facts: Facts) -> float:
    share = late_fraction(facts)
    return share * facts.typical.step_seconds if share >= LATE_WORK_FRACTION else 0.0


def _add_inside(inside: Sequence[Inside], found: dict[CauseName, float]) -> None:
    """A cause that was there for a part of the run, whatever its mean over all steps looks like."""
    named = {one.loss.name for one in inside}
    for name in named:
        own = [one for one in inside if one.loss.name == name]
        seconds = sum(one.loss.seconds * one.steps_fraction for one in own)
        missing = seconds - found.get(name, 0.0)
        found[name] = max(seconds, found.get(name, 0.0))
        for other in ("jitter", "slow-worker", "transport", "compute"):  # which it was taken for
            if other not in named and missing > 0:
                taken = min(missing, found.get(other, 0.0))
                found[other], missing = found.get(other, 0.0) - taken, missing - taken


def _add_unsteady(unsteady: Unsteady | Slowed | None, found: dict[CauseName, float]) -> None:
    """What comes and goes takes the place of the constant cause that its mean looks like."""
    if unsteady is None or ("readers" in found and unsteady.phase == "input"):
        return  # reading processes are done together: one step in so many waits for all of them
    alike: dict[str, tuple[CauseName, ...]] = {
        "input": ("input", "jitter", "slow-worker"),
        "outside": ("overhead", "jitter", "slow-worker"),
        "exchange_exposed": ("transport", "slow-link", "latency"),
    }
    for name in alike.get(unsteady.phase, ("compute", "jitter", "slow-worker")):
        seconds = found.get(name, 0.0)
        if seconds:
            found[name] = max(0.0, seconds - unsteady.seconds)
    kind: CauseName = "slowed" if isinstance(unsteady, Slowed) else "intermittent"
    found[kind] = found.get(kind, 0.0) + unsteady.seconds
