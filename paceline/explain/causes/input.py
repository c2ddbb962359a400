"""Causes in the input: samples that are prepared too slowly, and what their readers wait for."""

from dataclasses import replace

from paceline.explain.causes.machine import charge_shortage
from paceline.explain.causes.rule import CauseRule, charge_rest
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, Gain
from paceline.explain.ledger import INPUT, StepAccount
from paceline.explain.machine import is_full, readers_cores
from paceline.explain.needs import Needs, gain

READ_AHEAD = (
    "prepare samples ahead of the step: DataLoader(…, num_workers=2), or keep them (--cache)"
)
IDLE_READERS = 0.5
"""Reading processes that use less than this share of a core each wait for something."""


def _ready_input(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    waits = {worker.name: worker.phases["input"] for worker in facts.workers}
    full = facts.computes_here and is_full(facts)

    def without(share: float) -> Needs:
        own = {n: s - share * waits[n] for n, s in needs.own.items()}
        # What is prepared by others is still to be prepared, where cores are left for it.
        stays = 0.0 if full or not needs.cores else share * sum(waits.values()) / needs.cores
        return replace(needs, own=own, cpu=needs.cpu + stays)

    promised = Gain(low=gain(needs, without(0.5)).low, high=gain(needs, without(1.0)).high)
    text = "prepare samples once and keep them: no core is left to prepare them ahead"
    if not full:
        text, each = READ_AHEAD, loader_processes(facts)
        if each:
            text = f"use more processes in each loader: num_workers={2 * each} in place of {each}"
    return Action(text=text, gain=promised, effort="script")


def _cheaper_samples(evidence: Evidence) -> Action:
    """Processes that prepare samples use the cores that computing needs."""
    facts, needs, short = evidence.facts, evidence.needs, evidence.shortage
    assert short is not None
    threads = facts.experiment.cluster.threads or 1
    spare = {}
    for worker in facts.workers:  # at best it waits for nothing but its own CPU time
        waits, used = worker.phases["input"], facts.traffic[worker.name].own_cpu_seconds or 0.0
        spare[worker.name] = max(short.seconds + waits, needs.own[worker.name] - used / threads)

    def without(share: float) -> Needs:
        own = {name: max(1e-6, s - share * spare[name]) for name, s in needs.own.items()}
        return replace(needs, own=own, chance=(1 - share) * needs.chance, cpu=0.0)

    now = replace(needs, cpu=0.0)
    promised = Gain(low=gain(now, without(0.5)).low, high=gain(now, without(1.0)).high)
    text = "prepare samples once and keep them, make them cheaper, or give them cores of their "
    text += "own: another number of reading processes only moves the wait"
    return Action(text=text, gain=promised)


def _readers_in_words(evidence: Evidence, cost: str) -> str:
    short = evidence.shortage
    used = f" use {short.readers:.1f} of the {evidence.facts.cores} cores" if short else ""
    return (
        f"processes that prepare samples{used}, which computing needs: "
        f"waiting for cores and samples takes {cost}"
    )


def loader_processes(facts: Facts) -> int:
    """Processes per worker that prepare samples (`num_workers`); 0 where there are none."""
    counts = [member.counters.get("loader") for member in facts.members]
    known = [found.get("processes", 0) for found in counts if isinstance(found, dict)]
    return max(known, default=0)


def readers_wait(facts: Facts) -> bool:
    """Whether several reading processes are idle while the workers wait for samples."""
    each, workers = loader_processes(facts), len(facts.workers)
    return each > 1 and readers_cores(facts) < IDLE_READERS * each * workers


def _claim_readers(evidence: Evidence, ledger: StepAccount) -> None:
    if evidence.shortage is not None and evidence.shortage.name == "readers":
        charge_shortage(evidence, ledger)


def _claim_lock(evidence: Evidence, ledger: StepAccount) -> None:
    if readers_wait(evidence.facts):
        ledger.charge_all("reader-lock", INPUT)


def _lock_in_words(evidence: Evidence, cost: str) -> str:
    facts = evidence.facts
    each = loader_processes(facts)
    used = readers_cores(facts) / (each * len(facts.workers))
    text = f"workers wait for samples {cost}, and the {each} processes of each loader use only "
    return f"{text}{used:.0%} of a core each: they wait for each other (a lock) or for the disk"


def _against_lock(evidence: Evidence) -> list[Action]:
    found = _ready_input(evidence)
    text = "let readers share nothing: open files and connections in worker_init_fn, and take "
    text += "locks out of __getitem__; more processes do not help"
    return [Action(text=text, gain=found.gain, effort="script")]


CAUSES = (
    CauseRule(
        name="readers",
        title="processes that prepare samples use the cores that computing needs",
        proof="CPU of the workers' child processes; run delay",
        claim=_claim_readers,
        priority=53,
        accounts=(INPUT,),
        sentence=_readers_in_words,
        advice=lambda evidence: [_cheaper_samples(evidence)],
    ),
    CauseRule(
        name="reader-lock",
        title="processes of a loader wait for each other, or for the disk",
        proof="input phase; CPU of the workers' child processes; num_workers",
        claim=_claim_lock,
        priority=88,
        accounts=(INPUT,),
        sentence=_lock_in_words,
        advice=_against_lock,
    ),
    CauseRule(
        name="input",
        title="workers wait for samples",
        proof="input phase",
        claim=charge_rest("input", INPUT),
        priority=90,
        accounts=(INPUT,),
        sentence=lambda evidence, cost: f"the input is too slow: workers wait for samples {cost}",
        advice=lambda evidence: [_ready_input(evidence)],
    ),
)
