"""Causes in the exchange itself: codecs, small pieces, copies, and what nothing explains."""

from collections.abc import Iterator
from dataclasses import replace

from paceline import spec
from paceline.explain.causes.rule import CauseRule
from paceline.explain.changes import architecture_of, larger_batch, server_of
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action
from paceline.explain.ledger import BANDWIDTH, QUEUEING, TRANSPORT, UPLINK, StepAccount
from paceline.explain.limits import gradient_bytes
from paceline.explain.machine import is_full
from paceline.explain.needs import gain, scaled_links, spared, step_range
from paceline.units import format_bytes

REPEATED_FACTOR = 1.8
"""Gradients that travel this many times in one step are exchanged in each part of it."""


SMALL_PIECE_BYTES = 64 * 1024
"""Pieces below this cost more to handle than to send."""


def small_pieces(kind: spec.Architecture) -> int | None:
    """Bytes of the pieces that gradients travel in, where somebody made them small."""
    size = kind.piece_bytes
    return size if size is not None and size < SMALL_PIECE_BYTES else None


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


SHARED_MEMORY_FACTOR = 4.0
"""How much faster gradients move through memory than through loopback sockets, at best."""


def larger_pieces(evidence: Evidence) -> Iterator[Action]:
    """Pieces so small that each one's own cost is what an exchange takes."""
    kind, needs = evidence.facts.architecture, evidence.needs
    size = small_pieces(kind)
    if size is None:
        return
    option = kind.piece_option
    whole = kind.changed(**{option: "auto"})
    text = f"exchange larger pieces than {format_bytes(size)}: leave {option} out"
    promised = spared(needs, 0.3 * needs.exposed, needs.exposed)
    yield Action(text=text, gain=promised, change=architecture_of(whole))


def no_compression(evidence: Evidence) -> Action:
    facts, needs, kind = evidence.facts, evidence.needs, server_of(evidence)
    raw = _counter(facts, "compression_raw_bytes")
    encoded = _counter(facts, "compression_encoded_bytes")
    steps = facts.typical.steps + facts.experiment.measurement.warmup_steps
    added_bytes = max(0.0, raw - encoded) / steps  # gradients grow back; weights never shrank
    plain = replace(
        needs,
        out=_with_bytes(facts, needs.out, "worker", added_bytes),
        into=_with_bytes(facts, needs.into, "server", added_bytes),
    )
    low, high = step_range(needs, plain)
    encoding, step = min(compression_seconds(facts), needs.exposed), needs.step + needs.paused
    promised = spared(needs, step - high + encoding / 2, step - low + encoding)
    change = architecture_of(kind.changed(compression="none")) if kind else {}
    return Action(text="leave compression out", gain=promised, change=change)


def through_memory(evidence: Evidence) -> Iterator[Action]:
    """On one host, gradients need not pass through sockets."""
    facts, needs = evidence.facts, evidence.needs
    advised = spec.Server(placement="colocated")
    if facts.shares_memory or not facts.would_share_memory(advised) or facts.summary.workers < 2:
        return
    if not facts.architecture.is_all_reduce and server_of(evidence) is None:
        return
    most = (1 - 0.1 / SHARED_MEMORY_FACTOR) * needs.exposed
    promised = spared(needs, 0.4 * needs.exposed, most)
    change = {**architecture_of(advised), "servers": 0}
    text = "move gradients through shared memory: server:placement=colocated"
    yield Action(text=text, gain=promised, change=change)


def _with_bytes(
    facts: Facts, wire: dict[str, float], role: str, added_bytes: float
) -> dict[str, float]:
    """The links of all members of a role with so many more bytes a step, shared evenly."""
    own = [name for name in wire if name.startswith("server") == (role == "server")]
    rates = {name: facts.links[name].bandwidth_bits_per_second / 8 for name in own}
    more = {name: wire[name] + added_bytes / len(own) / rates[name] for name in own}
    return {**wire, **more}


def _counter(facts: Facts, name: str) -> float:
    values = [member.counters.get(name) for member in facts.members]
    return float(sum(value for value in values if isinstance(value, int | float)))


def _transport_in_words(evidence: Evidence, cost: str) -> str:
    size = small_pieces(evidence.facts.architecture)
    pieces = f" in pieces of {format_bytes(size)}" if size is not None else ""
    return f"moving gradients between processes{pieces} takes {cost}{_full(evidence.facts)}"


def _full(facts: Facts) -> str:
    full = facts.experiment.engine in ("here", "tunnel") and is_full(facts)
    return f"; all {facts.cores} cores are busy" if full else ""


def exchanges_a_step(facts: Facts) -> float | None:
    """How many times the gradients travelled in a step; None where their size is not known."""
    sizes = [member.counters.get("reach") for member in facts.members]
    known = [found for found in sizes if isinstance(found, dict) and found.get("trained_bytes")]
    if not known or not facts.architecture.is_all_reduce or len(facts.workers) < 2:
        return None
    travelled = gradient_bytes(facts)
    return None if travelled is None else travelled / float(known[0]["trained_bytes"])


def _claim_repeated(evidence: Evidence, ledger: StepAccount) -> None:
    times = exchanges_a_step(evidence.facts)
    if times is not None and times >= REPEATED_FACTOR:
        spare = (1 - 1 / times) * evidence.needs.exposed
        ledger.charge("repeated", spare, BANDWIDTH, UPLINK, TRANSPORT)


def _claim_compression(evidence: Evidence, ledger: StepAccount) -> None:
    """Encoding is what remains of an exchange when the bytes are few."""
    exposed = evidence.facts.typical.phases["exchange_exposed"]
    seconds = min(compression_seconds(evidence.facts), exposed)
    ledger.charge("compression", seconds, TRANSPORT, BANDWIDTH, UPLINK, QUEUEING)


def _claim_pieces(evidence: Evidence, ledger: StepAccount) -> None:
    """A server that only handles messages is not short of servers."""
    if small_pieces(evidence.facts.architecture) is not None:
        ledger.charge_all("transport", TRANSPORT, QUEUEING)


def _claim_unexplained(evidence: Evidence, ledger: StepAccount) -> None:
    """What is left between processes of one host is copying; elsewhere nothing explains it."""
    known = moves_in_host(evidence.facts) or small_pieces(evidence.facts.architecture)
    ledger.charge_all("transport" if known else "unexplained", TRANSPORT)


def moves_in_host(facts: Facts) -> bool:
    """Whether all gradients move between processes of one machine."""
    return facts.experiment.engine != "tunnel" and len(facts.hosts) == 1


def _unexplained_in_words(evidence: Evidence, cost: str) -> str:
    facts = evidence.facts
    text = f"{cost} of the exchange is not explained by any link, server or core that was measured"
    if not facts.links:
        text = f"the exchange takes {cost}, and the rate of the links is not known"
    return text


def _find_out(evidence: Evidence) -> Iterator[Action]:
    if not evidence.facts.links:
        text = "measure the network with `paceline net`, and give its rate: "
        yield Action(text=f"{text}`paceline explain RUN --link 10gbit`")
    else:
        text = "measure the cables with `paceline net`, and compare them with the given rate; then "
        yield Action(text=f"{text}run with `-n 1`: what stays is the script's own")


def _sum_first(evidence: Evidence) -> Iterator[Action]:
    needs, times = evidence.needs, exchanges_a_step(evidence.facts)
    assert times is not None
    once = scaled_links(needs, 1 / times)
    text = "let all but the last backward pass of a step run inside `with paceline.no_sync():`"
    yield Action(text=text, gain=gain(needs, once), effort="script")


def _against_transport(evidence: Evidence) -> Iterator[Action]:
    yield from larger_pieces(evidence)
    yield from through_memory(evidence)
    yield larger_batch(evidence, 2)


def _repeated_in_words(evidence: Evidence, cost: str) -> str:
    times = exchanges_a_step(evidence.facts)
    text = f"gradients are exchanged {times:.0f} times in each step, in every part of an "
    return f"{text}accumulated batch, and once is enough: it takes {cost}"


CAUSES = (
    CauseRule(
        name="compression",
        title="encoding costs more than the bytes it saves",
        proof="the codec's own clock",
        claim=_claim_compression,
        priority=40,
        of_experiment=True,
        sentence=lambda evidence, cost: (
            f"compressing gradients takes {cost}, and saves less than that"
        ),
        advice=lambda evidence: [no_compression(evidence)],
    ),
    CauseRule(
        name="repeated",
        title="gradients are exchanged in every part of an accumulated batch",
        proof="bytes counted, and the bytes of what is trained",
        claim=_claim_repeated,
        priority=45,
        sentence=_repeated_in_words,
        advice=_sum_first,
    ),
    CauseRule(
        name="transport",
        title="moving gradients between processes of one host, or in small pieces",
        proof="what is left of the exchange",
        claim=_claim_pieces,
        priority=58,
        accounts=(TRANSPORT,),
        sentence=_transport_in_words,
        advice=_against_transport,
    ),
    CauseRule(
        name="unexplained",
        title="no resource that was measured explains the time; the advice is how to find out",
        proof="what is left of the exchange when links, servers and cores are charged",
        claim=_claim_unexplained,
        priority=95,
        accounts=(TRANSPORT,),
        sentence=_unexplained_in_words,
        advice=_find_out,
    ),
)
