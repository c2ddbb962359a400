"""Causes in parameter servers: too few, uneven, without a core, or too small a quorum."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from paceline.explain import limits
from paceline.explain.causes.links import HALF_BUSY, other_placements
from paceline.explain.causes.rule import CauseRule, charge_rest
from paceline.explain.changes import WORTH_GAIN, architecture_of, served_by_more, server_of
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action
from paceline.explain.ledger import COMPUTE, EXCHANGE, INPUT, OVERHEAD, QUEUEING, StepAccount
from paceline.explain.needs import gain, served_overlap, spared
from paceline.explain.parts import busiest_server
from paceline.units import format_bytes, format_seconds

UNEVEN_FACTOR = 1.5
"""A server that holds this many times its even part of the bytes is held uneven."""

STARVED_SERVER_FRACTION = 0.15
"""A server that waits for a core for more of each step than this lacks one."""


LATE_WORK_FRACTION = 0.4
"""Gradients that came too late for their step, beyond which a quorum is too small. Less is what a
quorum is for."""


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


def more_servers(evidence: Evidence) -> Iterator[Action]:
    """Servers share what one carries; the workers' own links are the next limit."""
    facts, needs = evidence.facts, evidence.needs
    count = max(1, len(facts.servers))
    before = 0.0
    for factor in (2, 4):
        served = replace(served_by_more(needs, factor), overlap=served_overlap(facts))
        promised = gain(needs, served)
        # Twice the servers for what noise would give are no advice.
        if factor * count <= 2 * facts.summary.workers and promised.middle > before + WORTH_GAIN:
            before = promised.middle
            text = f"use {factor * count} servers in place of {count}"
            yield Action(text=text, gain=promised, change={"servers": factor * count})
    yield from other_placements(evidence)


def _larger_quorum(evidence: Evidence) -> Iterator[Action]:
    """No figure: throughput counts what is computed, used or not."""
    kind, workers = server_of(evidence), evidence.facts.summary.workers
    if kind is not None and workers > 2:
        more = msgspec.structs.replace(kind, quorum=workers - 1)
        text = f"let {workers - 1} of {workers} workers make a step: quorum={workers - 1}"
        yield Action(text=text, change=architecture_of(more))
    yield Action(text="or let every gradient count: mode=bounded")


def _late_work_in_words(evidence: Evidence) -> str:
    facts, kind = evidence.facts, evidence.facts.architecture.serving
    workers = facts.summary.workers
    text = f"{late_fraction(facts):.0%} of the gradients come too late for their step and are "
    text += "computed for nothing"
    if kind is not None and kind.quorum:
        text += f": {kind.quorum} of {workers} workers make a step"
    return text


def uneven_server(facts: Facts) -> tuple[str, float] | None:
    """Return the server that holds much more than its even part, and its share of the bytes."""
    held = {m.name: m.counters.get("served_bytes") for m in facts.servers}
    known = {name: float(size) for name, size in held.items() if isinstance(size, int | float)}
    whole = sum(known.values())
    if len(known) < 2 or not whole:
        return None
    most = max(known, key=lambda name: known[name])
    share = known[most] / whole
    return (most, share) if share > UNEVEN_FACTOR / len(known) else None


def starved_server(facts: Facts) -> tuple[str, float] | None:
    """Return the server that waits longest for a core of its machine, and how long per step."""
    waits = {}
    for member in facts.servers:
        traffic = facts.traffic.get(member.name)
        if traffic is not None and traffic.cpu_wait_seconds is not None:
            waits[member.name] = traffic.cpu_wait_seconds
    name = max(waits, key=lambda one: waits[one], default="")
    if not name or waits[name] < STARVED_SERVER_FRACTION * facts.typical.step_seconds:
        return None
    return name, waits[name]


def _claim_late_work(evidence: Evidence, ledger: StepAccount) -> None:
    seconds = _late_work_seconds(evidence.facts)
    ledger.charge("late-work", seconds, COMPUTE, *EXCHANGE, INPUT, OVERHEAD)


def _claim_uneven(evidence: Evidence, ledger: StepAccount) -> None:
    found = uneven_server(evidence.facts)
    if found is not None and busiest_is(evidence, found[0]):
        ledger.charge_all("uneven-servers", QUEUEING)


def _claim_core(evidence: Evidence, ledger: StepAccount) -> None:
    found = starved_server(evidence.facts)
    if found is not None:
        ledger.charge("server-core", found[1], QUEUEING, *EXCHANGE)


def busiest_is(evidence: Evidence, name: str) -> bool:
    """Whether the exchange waits for this server."""
    needs = evidence.needs
    known = any(one.startswith("server") for one in (*needs.out, *needs.serving))
    return known and busiest_server(needs) == name


def _server_in_words(evidence: Evidence, cost: str) -> str:
    facts, needs = evidence.facts, evidence.needs
    name = busiest_server(needs)
    work = needs.serving.get(name, 0.0)
    wire = max(needs.out.get(name, 0.0), needs.into.get(name, 0.0))
    what = "its link" if wire >= work else "it"
    busy = limits.busy(facts, max(work, wire))
    text = f"queueing at {name} takes {cost}: {what} is busy {busy:.0%} of the time"
    if busy < HALF_BUSY:
        text += "; it idles while workers compute, and all of them wait for it together afterwards"
    return text


def _uneven_in_words(evidence: Evidence, cost: str) -> str:
    found = uneven_server(evidence.facts)
    assert found is not None
    count = len(evidence.facts.servers)
    text = f"{found[0]} holds {found[1]:.0%} of the bytes of {count} servers, and the others wait "
    return f"{text}for it: queueing there takes {cost}"


def _core_in_words(evidence: Evidence, cost: str) -> str:
    found = starved_server(evidence.facts)
    assert found is not None
    text = f"{found[0]} lacks a core: it is ready to work and waits for one for "
    text += f"{format_seconds(found[1])} of each step"
    return f"{text}; workers wait for it, which takes {cost}"


def _even_chunks(evidence: Evidence) -> Iterator[Action]:
    """Smaller chunks can be dealt evenly."""
    facts, needs, kind = evidence.facts, evidence.needs, server_of(evidence)
    found = uneven_server(facts)
    if kind is None or found is None:
        return
    name, share = found
    even = 1 / len(facts.servers)

    def dealt(wire: dict[str, float]) -> dict[str, float]:
        per_share = wire.get(name, 0.0) / share
        return {n: per_share * even if n.startswith("server") else s for n, s in wire.items()}

    then = replace(
        needs,
        out=dealt(needs.out),
        into=dealt(needs.into),
        serving=dealt(needs.serving),
        overlap=served_overlap(facts),
    )
    changed, text = msgspec.structs.replace(kind, chunk="auto"), "leave the chunk size out"
    if kind.piece_bytes is None:  # one tensor is larger than a server's part
        size = max(64 * 1024, int(limits.gradient_bytes(facts) or 0) // (8 * len(facts.servers)))
        changed = msgspec.structs.replace(kind, chunk=f"{size // 1024}KiB")
        text = f"cut gradients into chunks of {format_bytes(size)}"
    text += f", so that each of the {len(facts.servers)} servers carries as much"
    yield Action(text=text, gain=gain(needs, then), change=architecture_of(changed))


def _give_core(evidence: Evidence) -> Iterator[Action]:
    found = starved_server(evidence.facts)
    assert found is not None
    seconds = min(found[1], evidence.needs.exposed)
    promised = spared(evidence.needs, 0.4 * seconds, seconds)
    text = f"give {found[0]} a core of its own: end what else runs on its host, or move it"
    yield Action(text=text, gain=promised, effort="script")


CAUSES = (
    CauseRule(
        name="late-work",
        title="a quorum so small that most gradients come too late and are computed for nothing",
        proof="servers' count of late gradients",
        claim=_claim_late_work,
        priority=10,
        of_experiment=True,
        sentence=lambda evidence, cost: _late_work_in_words(evidence),
        advice=_larger_quorum,
    ),
    CauseRule(
        name="server-core",
        title="a server waits for a core that others use",
        proof="the kernel's run delay of the server",
        claim=_claim_core,
        priority=52,
        sentence=_core_in_words,
        advice=_give_core,
    ),
    CauseRule(
        name="uneven-servers",
        title="one server holds most of the bytes, and the others are idle",
        proof="bytes that each server holds",
        claim=_claim_uneven,
        priority=59,
        of_experiment=True,
        sentence=_uneven_in_words,
        advice=_even_chunks,
    ),
    CauseRule(
        name="server",
        title="a server, or its link, is needed longer than any worker's link",
        proof="bytes, CPU of the server",
        claim=charge_rest("server", QUEUEING),
        priority=65,
        accounts=(QUEUEING,),
        sentence=_server_in_words,
        advice=more_servers,
    ),
)
