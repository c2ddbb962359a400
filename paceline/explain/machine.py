"""What the machine lacked: cores for its own members, cores that others took, memory."""

from dataclasses import dataclass
from typing import Literal

from paceline.explain.facts import Facts, WorkerFacts
from paceline.explain.limits import BUSY_FRACTION

STARVED_FRACTION = 0.75
"""Less CPU time than this share of the time spent computing: somebody else had the core."""

OTHERS_CORES = 0.3
"""Cores that processes outside the job, or those that members started, use above which they are
named."""

SCARCE_MEMORY_FRACTION = 0.03
"""Memory still to be had, below which the machine is about to swap or to kill."""

ALONE_FACTOR = 2.0
"""A worker that waits for a core so many times as long as any other is named."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Cores were short."""

    name: Literal["cores", "cpu-taken", "readers"]
    seconds: float
    """Of each step of the typical worker, or of the only one that waits, spent without a core."""

    wanted: int
    """Threads that compute at once."""

    others: float
    """Cores that processes outside the job used."""

    readers: float
    """Cores that processes used which the members started: those of data loaders."""

    worker: str
    """The only one that waits for a core; empty where more than one does."""


def shortage(facts: Facts) -> Shortage | None:
    """Whether workers waited for a core, how long, and who had it; None where they did not."""
    if not facts.cores or len(facts.traffic) < len(facts.members):
        return None
    if not facts.computes_here and not has_readers(facts):
        return None  # a device of its own computes, whoever has the cores
    waits = {worker.name: waited_seconds(facts, worker) for worker in facts.workers}
    longest = max(waits, key=lambda worker: waits[worker])
    rest = max((s for worker, s in waits.items() if worker != longest), default=0.0)
    alone = facts.together and len(waits) > 1 and waits[longest] > ALONE_FACTOR * rest
    seconds = waits[longest] if alone else waits[facts.typical.name]
    readers, others = readers_cores(facts), others_cores(facts)
    if seconds <= 0 and readers < OTHERS_CORES:
        return None
    threads = facts.experiment.cluster.threads or 1
    wanted = len(facts.workers) * threads + len(facts.servers)
    fits = wanted <= facts.cores
    name: Literal["cores", "cpu-taken", "readers"] = "cores"
    if others >= OTHERS_CORES and (fits or others > own_cores(facts)) and others > readers:
        name = "cpu-taken"
    elif has_readers(facts) and (fits or readers > 0.5 * own_cores(facts)):
        name = "readers"
    elif fits or seconds <= 0:
        return None  # neither too many members nor anybody else: threads of one process take turns
    return Shortage(
        name=name,
        seconds=seconds,
        wanted=wanted,
        others=others,
        readers=readers,
        worker=longest if alone else "",
    )


def waited_seconds(facts: Facts, worker: WorkerFacts) -> float:
    """How long a worker was ready to run in each step and had no core.

    The kernel counts it; where it does not, computing that used little CPU time tells.
    """
    traffic = facts.traffic[worker.name]
    threads = facts.experiment.cluster.threads or 1
    used = traffic.own_cpu_seconds
    # Whoever computed had a core meanwhile.
    most = worker.step_seconds - worker.phases["wait"] - (used or 0.0) / threads
    if traffic.cpu_wait_seconds is not None:
        return max(0.0, min(traffic.cpu_wait_seconds, most))
    if used is None:
        return 0.0
    starved = used < STARVED_FRACTION * worker.compute_seconds
    return worker.compute_seconds - used if starved else 0.0


def own_cores(facts: Facts) -> float:
    """Cores in use over all members, and what they started."""
    used = [traffic.cpu_seconds or 0.0 for traffic in facts.traffic.values()]
    return sum(used) / facts.typical.step_seconds


def readers_cores(facts: Facts) -> float:
    """Cores in use by processes that the members started."""
    used = sum(traffic.children_cpu_seconds for traffic in facts.traffic.values())
    return used / facts.typical.step_seconds


def has_readers(facts: Facts) -> bool:
    """Whether such processes use cores that are all in use, more than strangers do."""
    readers, others = readers_cores(facts), others_cores(facts)
    full = own_cores(facts) + others >= BUSY_FRACTION * facts.cores
    return readers >= OTHERS_CORES and readers > others and full


def others_cores(facts: Facts) -> float:
    """Cores that processes outside the job used; 0 where the machine's use is not known."""
    known = [t.machine_cpu_seconds for t in facts.traffic.values() if t.machine_cpu_seconds]
    if not known or facts.experiment.engine not in ("here", "tunnel"):
        return 0.0
    return max(0.0, max(known) / facts.typical.step_seconds - own_cores(facts))


def is_full(facts: Facts) -> bool:
    """Whether the members themselves leave no core idle."""
    if not facts.cores or len(facts.traffic) < len(facts.members):
        return False
    return own_cores(facts) >= BUSY_FRACTION * facts.cores


def short_of_memory(facts: Facts) -> bool:
    least = facts.least_available_bytes
    return least is not None and least < SCARCE_MEMORY_FRACTION * facts.memory_bytes
