"""Causes in the machine: cores that are too few or that others use, and memory that is full."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.explain.causes.rule import CauseRule
from paceline.explain.changes import all_own
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action
from paceline.explain.ledger import COMPUTE, INPUT, OVERHEAD, TRANSPORT, WAIT, StepAccount
from paceline.explain.machine import own_cores
from paceline.explain.needs import gain
from paceline.units import format_bytes

FREE_CORES = "end what else runs on these cores, or use others"

OTHERS_MEMORY_FRACTION = 0.4
"""A share of the memory that other processes hold, above which they are named."""


SHARED_CORES = 0.7
"""Members that use more of the machine's cores than this have to share them."""


CORE_JITTER = 2.0
"""Who waits for a core by chance is last by chance: by about this many times the mean wait."""


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


def _against_shortage(evidence: Evidence) -> Iterator[Action]:
    facts, short, needs = evidence.facts, evidence.shortage, evidence.needs
    if has_fewer_cores(evidence):
        lost = sum(part.lost_seconds for part in evidence.parts if part.name == "compute")
        alone = replace(all_own(needs, -max(0.0, lost)), cpu=0.0)
        text = "give each worker a host or a device of its own: one worker alone has all "
        text += f"{facts.cores} cores of this one"
        yield Action(text=text, gain=gain(replace(needs, cpu=0.0), alone))
    if short is None:
        return
    relieved = all_own(needs, -short.seconds)
    if short.worker:  # the others have their cores
        relieved = replace(relieved, own={**needs.own, short.worker: relieved.own[short.worker]})
    promised = gain(replace(needs, cpu=0.0), replace(relieved, cpu=0.0))
    if short.name == "cpu-taken":
        yield Action(text=FREE_CORES, gain=promised)
        return
    threads = facts.experiment.cluster.threads or 1
    text = f"give the job {short.wanted} cores or a device per worker: it has {facts.cores}"
    yield Action(text=text, gain=promised)
    fitting = max(1, facts.cores // threads)
    if fitting < len(facts.workers):
        yield Action(text=f"or use {fitting} workers here: more only take cores from each other")


def _cores_in_words(evidence: Evidence, cost: str) -> str:
    baseline = evidence.baseline
    if baseline is None or not has_fewer_cores(evidence):
        return f"cores are short: waiting for one takes {cost}{_short(evidence)}"
    own, other = threads_each(evidence.facts), threads_each(baseline)
    return (
        f"workers share the {evidence.facts.cores} cores: computing takes {cost} longer with "
        f"{own} of them a worker than with the baseline's {other}"
    )


def _taken_in_words(evidence: Evidence, cost: str) -> str:
    short = evidence.shortage
    if short is not None and short.worker:
        return f"other processes have the core of {short.worker}, whose wait for it takes {cost}"
    return f"other processes have the cores: waiting for one takes {cost}{_short(evidence)}"


def _short(evidence: Evidence) -> str:
    short, facts = evidence.shortage, evidence.facts
    if short is None:
        return ""
    if short.name == "cpu-taken":
        return f"; they use {short.others:.1f} of {facts.cores}"
    return f"; {short.wanted} threads share {facts.cores} cores"


def others_memory(facts: Facts) -> int | None:
    """Bytes of memory that processes outside the job hold; None where it is not known."""
    least = facts.least_available_bytes
    own = [member.max_rss_bytes for member in facts.members]
    if least is None or not facts.memory_bytes or len(facts.hosts_of_machine) != 1:
        return None
    if any(size is None for size in own):
        return None
    return max(0, facts.memory_bytes - least - sum(size or 0 for size in own))


def others_hold_memory(facts: Facts) -> bool:
    """Whether memory is full because of processes outside the job."""
    others = others_memory(facts)
    return others is not None and others > OTHERS_MEMORY_FRACTION * facts.memory_bytes


def charge_shortage(evidence: Evidence, ledger: StepAccount) -> None:
    """Charge what waits for a core: in computing, in the exchange, and as the last by chance."""
    short = evidence.shortage
    if short is None:
        return
    by_chance = 0.0
    if evidence.late is None:
        by_chance = ledger.charge(short.name, CORE_JITTER * short.seconds, WAIT)
    ledger.charge(short.name, short.seconds - by_chance, TRANSPORT, COMPUTE, OVERHEAD)
    if short.name == "readers":  # samples come late now here and now there, for want of cores
        ledger.charge_all(short.name, INPUT)
        if evidence.late is None:
            ledger.charge_all(short.name, WAIT)


def _claim_cores(evidence: Evidence, ledger: StepAccount) -> None:
    if evidence.shortage is not None and evidence.shortage.name == "cores":
        charge_shortage(evidence, ledger)


def _claim_taken(evidence: Evidence, ledger: StepAccount) -> None:
    if evidence.shortage is not None and evidence.shortage.name == "cpu-taken":
        charge_shortage(evidence, ledger)


def _memory_in_words(evidence: Evidence, cost: str) -> str:
    facts = evidence.facts
    left, whole = format_bytes(facts.least_available_bytes or 0), format_bytes(facts.memory_bytes)
    text = f"memory is full: {left} of {whole} were left"
    if others_hold_memory(facts):
        text += f"; processes outside this job hold {format_bytes(others_memory(facts) or 0)}"
    return text


def _against_memory(evidence: Evidence) -> Iterator[Action]:
    if others_hold_memory(evidence.facts):
        text = "end the other processes that hold memory (`ps aux --sort=-rss` lists them)"
        yield Action(text=text)
        return
    yield Action(text="use a smaller batch, fewer workers here, or hosts with more memory")


CAUSES = (
    CauseRule(
        name="memory",
        title="the machine was about to swap or to stop a process",
        proof="memory that was available, and what each member held",
        sentence=_memory_in_words,
        advice=_against_memory,
    ),
    CauseRule(
        name="cores",
        title="more threads than cores",
        proof="the kernel's run delay of the computing thread",
        claim=_claim_cores,
        priority=50,
        accounts=(COMPUTE,),
        sentence=_cores_in_words,
        advice=_against_shortage,
    ),
    CauseRule(
        name="cpu-taken",
        title="processes outside the job use the cores",
        proof="run delay; the machine's CPU compared with the members'",
        claim=_claim_taken,
        priority=51,
        accounts=(COMPUTE,),
        sentence=_taken_in_words,
        advice=_against_shortage,
    ),
)
