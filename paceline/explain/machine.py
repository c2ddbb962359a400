"""What the machine lacked: cores for its own members, cores that others took, memory."""

from dataclasses import dataclass
from typing import Literal

from paceline.explain.facts import Facts, WorkerFacts
from paceline.explain.limits import BUSY_FRACTION

STARVED_FRACTION = 0.75
"""Less CPU time than this share of the time spent computing: somebody else had the core."""

OTHERS_CORES = 0.3
"""Cores that processes outside the job use, above which they are named."""

SCARCE_MEMORY_FRACTION = 0.03
"""Memory still to be had, below which the machine is about to swap or to kill."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Cores were short."""

    name: Literal["cores", "cpu-taken"]
    seconds: float
    """Of each step of the typical worker, spent waiting for a core."""

    wanted: int
    """Threads that compute at once."""

    others: float
    """Cores that processes outside the job used."""


def shortage(facts: Facts) -> Shortage | None:
    """Whether workers waited for a core, how long, and who had it; None where they did not."""
    if not facts.cores or not facts.computes_here or len(facts.traffic) < len(facts.members):
        return None
    seconds = waited_seconds(facts, facts.typical)
    if seconds <= 0:
        return None
    threads = facts.experiment.cluster.threads or 1
    wanted, others = len(facts.workers) * threads + len(facts.servers), others_cores(facts)
    taken = others >= OTHERS_CORES and (wanted <= facts.cores or others > own_cores(facts))
    if not taken and wanted <= facts.cores:
        return None  # neither too many members nor anybody else: threads of one process take turns
    return Shortage(
        name="cpu-taken" if taken else "cores", seconds=seconds, wanted=wanted, others=others
    )


def waited_seconds(facts: Facts, worker: WorkerFacts) -> float:
    """How long a worker was ready to run in each step and had no core.

    The kernel counts it; where it does not, computing that used little CPU time tells.
    """
    traffic = facts.traffic[worker.name]
    threads = facts.experiment.cluster.threads or 1
    # Whoever computed had a core meanwhile.
    most = worker.step_seconds - worker.phases["wait"] - (traffic.cpu_seconds or 0.0) / threads
    if traffic.cpu_wait_seconds is not None:
        return max(0.0, min(traffic.cpu_wait_seconds, most))
    if traffic.cpu_seconds is None:
        return 0.0
    starved = traffic.cpu_seconds < STARVED_FRACTION * worker.compute_seconds
    return worker.compute_seconds - traffic.cpu_seconds if starved else 0.0


def own_cores(facts: Facts) -> float:
    """Cores in use over all members."""
    used = [traffic.cpu_seconds or 0.0 for traffic in facts.traffic.values()]
    return sum(used) / facts.typical.step_seconds


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
