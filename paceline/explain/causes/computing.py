"""Causes in computing: a batch too small for a step's measured fixed costs, slower code."""

from collections.abc import Iterator

from paceline import spec
from paceline.explain.causes.exchange import moves_in_host, small_pieces
from paceline.explain.causes.machine import has_fewer_cores
from paceline.explain.causes.rule import CauseRule
from paceline.explain.changes import FEW_SAMPLES, FIXED_OF_FEW, architecture_of, larger_batch
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts, WorkerFacts, own_seconds
from paceline.explain.findings import Action
from paceline.explain.ledger import COMPUTE, OVERHEAD, TRANSPORT, StepAccount
from paceline.explain.needs import spared
from paceline.units import format_seconds

SCRIPT_SECONDS = 0.005
"""Bookkeeping takes less per step; what takes longer is something the script does."""

ELSEWHERE = (
    *("slow-link", "slow-cable", "uplink", "server", "uneven-servers", "server-core", "latency"),
    *("cores", "cpu-taken", "readers", "compression", "repeated"),
)
"""Causes that, if they cost more, are not the fixed cost of a step."""


BULK_BYTES = 16e6
"""Gradients of a step that are many: a larger batch makes them rarer, not fewer."""


def fixed_seconds(worker: WorkerFacts, transport_seconds: float) -> float:
    """What a step costs however few samples it has, links and other members aside."""
    return worker.phases["update"] + worker.overhead_seconds + transport_seconds


def _moves_much(facts: Facts) -> bool:
    """Whether moving gradients is work, and not what each message costs."""
    traffic = facts.traffic.get(facts.typical.name)
    return traffic is not None and traffic.busier_bytes > BULK_BYTES


def _as_in_baseline(evidence: Evidence) -> Action:
    """Computing that takes longer for as many samples, on as many cores."""
    lost = sum(part.lost_seconds for part in evidence.parts if part.name == "compute")
    text = f"look at what {slower_phase(evidence)} does here that the baseline's does not: hooks, "
    text += "other layers, larger samples, another precision or layout"
    return Action(text=text, gain=spared(evidence.needs, 0.5 * lost, lost))


def slower_phase(evidence: Evidence) -> str:
    """The phase of computing that takes most longer than the baseline's."""
    facts, baseline = evidence.facts, evidence.baseline
    assert baseline is not None
    scale = facts.typical.samples / baseline.typical.samples
    own, other = facts.typical.phases, baseline.typical.phases
    return max(("forward", "backward", "update"), key=lambda p: own[p] - scale * other[p])


def shared_update(evidence: Evidence) -> Iterator[Action]:
    """Every worker of a ring updates all weights; workers that serve update their part alone."""
    facts, needs = evidence.facts, evidence.needs
    update, workers = facts.typical.phases["update"], facts.summary.workers
    if not facts.architecture.is_all_reduce or workers < 2 or not facts.computes_here:
        return
    spare = (1 - 1 / workers) * update
    text = "let each worker update a part of the weights: server:placement=colocated, for "
    text += "optimizers that work element by element"
    change = architecture_of(spec.Server(placement="colocated"))
    yield Action(text=text, gain=spared(needs, 0.5 * spare, spare), change=change)


def _small_batch_in_words(evidence: Evidence, cost: str) -> str:
    typical = evidence.facts.typical
    text = f"the batch of {typical.samples:g} a worker is too small: "
    text += f"what a step costs with any batch takes {cost}"
    update = typical.phases["update"]
    if update > 0.5 * (typical.step_seconds - typical.phases["forward"]):
        text += f", and most of that is the optimizer's update, {format_seconds(update)}"
    return text


def _claim_against_baseline(evidence: Evidence, ledger: StepAccount) -> None:
    """Charge computing that takes longer than the baseline's for as many samples."""
    facts, baseline = evidence.facts, evidence.baseline
    if baseline is None:
        return
    lost = sum(part.lost_seconds for part in evidence.parts if part.name == COMPUTE)
    lost -= ledger.charged_to(COMPUTE)
    smaller = facts.typical.samples < 0.75 * baseline.typical.samples
    alone = "cores" if has_fewer_cores(evidence) else "compute"
    ledger.charge("small-batch" if smaller else alone, lost, COMPUTE)


def _claim_fixed(evidence: Evidence, ledger: StepAccount) -> None:
    """Costs that were measured and do not grow with the batch, where they exceed those that do.

    A pause that the script makes in every step is fixed too, but it is the script's. Exchange that
    no resource explains is not a fixed cost unless it stays inside one host.
    """
    facts, typical = evidence.facts, evidence.facts.typical
    if not knows_samples(facts):
        return
    if typical.overhead_seconds > SCRIPT_SECONDS or small_pieces(facts.architecture) is not None:
        return
    per_sample = own_seconds(typical) - typical.phases["update"] - typical.overhead_seconds
    if facts.computes_here and typical.samples < FEW_SAMPLES:
        per_sample *= 1 - FIXED_OF_FEW
    handled = ledger.left.get(TRANSPORT, 0.0) if moves_in_host(facts) else 0.0
    fixed = fixed_seconds(typical, handled)
    if _moves_much(facts) and handled > fixed / 2:
        return
    if fixed <= per_sample or fixed <= ledger.seconds(*ELSEWHERE):
        return
    ledger.charge("small-batch", handled, TRANSPORT)
    ledger.charge_all("small-batch", OVERHEAD)
    ledger.charge("small-batch", typical.phases["update"], COMPUTE)


def knows_samples(facts: Facts) -> bool:
    """Whether the samples of a step were counted; the traces of an imported job hold none."""
    seen = [member.counters.get("observed") for member in facts.members]
    return not any(isinstance(one, dict) and one.get("samples") == "unknown" for one in seen)


def _against_small_batch(evidence: Evidence) -> Iterator[Action]:
    yield larger_batch(evidence, 2)
    yield larger_batch(evidence, 4)
    yield from shared_update(evidence)


CAUSES = (
    CauseRule(
        name="compute",
        title="computing takes longer than the baseline's for as many samples",
        proof="both runs' phases",
        claim=_claim_against_baseline,
        priority=55,
        accounts=(COMPUTE,),
        sentence=lambda evidence, cost: (
            f"computing, mostly {slower_phase(evidence)}, takes {cost} longer than in the baseline"
        ),
        advice=lambda evidence: [_as_in_baseline(evidence)],
    ),
    CauseRule(
        name="small-batch",
        title="what a step costs with any batch, the optimizer's update included, is most of it",
        proof="fixed parts of a step",
        claim=_claim_fixed,
        priority=80,
        accounts=(OVERHEAD,),
        of_experiment=True,
        sentence=_small_batch_in_words,
        advice=_against_small_batch,
    ),
)
