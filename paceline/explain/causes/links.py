"""Causes in the network: cables, uplinks of racks, and delays."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from paceline import spec
from paceline.explain import limits
from paceline.explain.causes.rule import CauseRule, charge_rest
from paceline.explain.changes import (
    architecture_of,
    larger_batch,
    server_of,
    with_exchange,
    without_cable,
)
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action
from paceline.explain.ledger import BANDWIDTH, LATENCY, QUEUEING, UPLINK, WAIT, StepAccount
from paceline.explain.needs import Needs, gain, scaled_links, scaled_uplinks, served_overlap, spared
from paceline.explain.parts import busiest_worker_link
from paceline.units import format_bandwidth, format_seconds

SLOW_CABLE = 0.8
"""A cable below this share of the typical one's rate is a slow cable."""


FAR_FACTOR = 2.0
"""A cable with more than this many times the usual delay leads far away."""

ALIKE_CABLES = 1.1
"""Cables whose rates differ by less than this factor are alike."""

HALF_BUSY = 0.5
"""A resource that is needed for less than this share of the time is said to idle, and why."""


def slow_cables(facts: Facts, needs: Needs) -> tuple[str, ...]:
    """Return the members whose cables are slower than the others' and limit the exchange."""
    if len(facts.links) < 2 or not needs.out:
        return ()
    rates = {name: link.bandwidth_bits_per_second for name, link in facts.links.items()}
    limiting = max(needs.out, key=lambda m: max(needs.out[m], needs.into[m]))
    slow = tuple(name for name in rates if rates[name] < ALIKE_CABLES * rates[limiting])
    others = [rate for name, rate in rates.items() if name not in slow]
    if not others or len(slow) > len(others) or rates[limiting] > SLOW_CABLE * median(others):
        return ()
    return slow


def usual_rate(facts: Facts, slow: Sequence[str]) -> float:
    """Bits per second of the cables that are not among the slow ones."""
    rates = [link.bandwidth_bits_per_second for n, link in facts.links.items() if n not in slow]
    return median(rates)


def joined(names: Sequence[str]) -> str:
    """Return names as a list in words: "worker1, worker2 and worker3"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def idle_in_words(evidence: Evidence, seconds: float) -> str:
    """Why a resource that idles for more than half of the time still limits; empty otherwise."""
    busy = limits.busy(evidence.facts, seconds)
    if busy >= HALF_BUSY:
        return ""
    why = "it idles until backward makes gradients, and the step waits until they have left"
    if evidence.facts.architecture.averaging is not None:
        why = "it idles between two averages, and each average waits for it"
    return f"; {why}"


def better_cables(evidence: Evidence) -> Iterator[Action]:
    """Slow cables become like the others."""
    facts, needs = evidence.facts, evidence.needs
    names = slow_cables(facts, needs)
    if not names:
        return
    usual = usual_rate(facts, names)
    ratio = {n: facts.links[n].bandwidth_bits_per_second / usual for n in names}
    better = replace(
        needs,
        out={n: s * ratio.get(n, 1.0) for n, s in needs.out.items()},
        into={n: s * ratio.get(n, 1.0) for n, s in needs.into.items()},
    )
    if server_of(evidence) is not None:  # chunks that waited for one server may now be hidden
        better = replace(better, overlap=served_overlap(facts))
    many = len(names) > 1
    text = f"replace the {'cables' if many else 'cable'} of {joined(names)}, or repair "
    text += f"{'their ports' if many else 'its port'}: the others have {format_bandwidth(usual)}"
    promised = gain(needs, better)
    yield Action(text=text, gain=promised, change=without_cable(facts, names), effort="money")


def far_away(facts: Facts) -> str:
    """The one member whose cable has a delay that the others' have not; empty if none."""
    delays = {name: link.latency_seconds for name, link in facts.links.items()}
    far = [name for name, own in delays.items() if own > FAR_FACTOR * median(delays.values())]
    return far[0] if len(far) == 1 else ""


def against_bytes(evidence: Evidence) -> Iterator[Action]:
    """Fewer bytes over the busiest link: another placement, or compressed gradients."""
    yield from other_placements(evidence)
    yield from rarer_averages(evidence)
    kind, needs = server_of(evidence), evidence.needs
    if kind is None or kind.compression != "none":
        return
    # Gradients are compressed and weights are not: what a dedicated server's worker receives stays
    # as it is; where workers serve, a quarter of both directions goes.
    if kind.placement == "dedicated":
        workers = {name for name in needs.out if not name.startswith("server")}
        less = replace(
            needs,
            out={n: s / 2 if n in workers else s for n, s in needs.out.items()},
            into={n: s if n in workers else s / 2 for n, s in needs.into.items()},
        )
    else:
        less = scaled_links(needs, 0.75)
    half = kind.changed(compression="bf16")
    text = "send gradients in half the bytes: compression=bf16"
    yield Action(text=text, gain=gain(needs, less), change=architecture_of(half))


def faster_links(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    rate = max((link.bandwidth_bits_per_second for link in facts.links.values()), default=1e9)
    text = f"use links of {format_bandwidth(10 * rate)}"
    promised = gain(needs, scaled_links(needs, 0.1)) if needs.out else None
    change: dict[str, object] = {"link": f"{10 * rate / 1e6:g}mbit"}
    tunnel = facts.experiment.engine == "tunnel" and not facts.experiment.cluster.hosts
    return Action(text=text, gain=promised, change=change if tunnel else {}, effort="money")


def other_placements(evidence: Evidence) -> Iterator[Action]:
    """Placements and numbers of servers whose closed form is shorter."""
    facts, needs, kind = evidence.facts, evidence.needs, server_of(evidence)
    now, size = limits.closed_form_seconds(facts), limits.gradient_bytes(facts)
    if now is None or size is None or not now:
        return
    workers, servers = facts.summary.workers, facts.summary.servers
    rate = next(iter(facts.links.values())).bandwidth_bits_per_second / 8
    base = kind or spec.Server()
    options: list[tuple[spec.Server, int, str]] = []
    if kind is None or kind.placement != "colocated":
        shared = msgspec.structs.replace(base, placement="colocated")
        text = "let every worker serve a part: server:placement=colocated"
        options.append((shared, 0, text))
    if kind is None or (kind.placement == "colocated" and servers < workers):
        apart = msgspec.structs.replace(base, placement="dedicated")
        text = f"add {workers} servers on hosts of their own: server with --servers {workers}"
        options.append((apart, workers, text))
    for other, count, text in options:
        then = limits.exchange_seconds(other, workers, count, size, rate)
        if then is not None and then < now:
            served = replace(with_exchange(needs, then / now), overlap=served_overlap(facts))
            promised = gain(needs, served)
            change = {**architecture_of(other), "servers": count}
            yield Action(text=text, gain=promised, change=change)


def nearer(evidence: Evidence) -> Iterator[Action]:
    """One cable with a delay that the others do not have."""
    name = far_away(evidence.facts)
    if not name:
        return
    delays = {n: link.latency_seconds for n, link in evidence.facts.links.items()}
    left = median(delays.values()) / delays[name]
    cost = next(part.seconds for part in evidence.parts if part.name == "exchange: latency")
    text = f"look at the cable of {name}, or use a host that is nearer: its delay is "
    text += f"{format_seconds(delays[name])}, the others' "
    text += format_seconds(median(delays.values())) if left else "next to nothing"
    promised = spared(evidence.needs, 0.5 * (1 - left) * cost, (1 - left) * cost)
    yield Action(text=text, gain=promised, change=without_cable(evidence.facts, [name]))


def rarer_averages(evidence: Evidence) -> Iterator[Action]:
    facts, needs = evidence.facts, evidence.needs
    kind = facts.architecture.averaging
    if kind is not None:
        rarer = msgspec.structs.replace(kind, every=8 * kind.every)
        text = f"average every {rarer.every} steps in place of {kind.every}: it trains differently"
        promised = gain(needs, with_exchange(needs, 1 / 8))
        yield Action(text=text, gain=promised, change=architecture_of(rarer))


def fewer_rounds(evidence: Evidence) -> Iterator[Action]:
    """Two messages one after the other in place of the ring's 2(n-1)."""
    facts, needs = evidence.facts, evidence.needs
    if facts.architecture.is_all_reduce and facts.summary.workers > 2:
        factor = 1 / (facts.summary.workers - 1)
        fewer = replace(needs, latency=needs.latency * factor)
        text = "exchange in two messages in place of a ring's "
        text += f"{2 * (facts.summary.workers - 1)}: server:placement=colocated"
        change = architecture_of(spec.Server(placement="colocated"))
        yield Action(text=text, gain=gain(needs, fewer), change=change)
    if facts.architecture.averaging is None:
        text = "exchange less often: average:every=8 trains differently, and compare says how much"
        yield Action(text=text)


def _latency_in_words(evidence: Evidence, cost: str) -> str:
    name = far_away(evidence.facts)
    if name:
        delay = format_seconds(evidence.facts.links[name].latency_seconds)
        return f"the delay of {name}'s cable, {delay}, takes {cost}: all messages wait for its"
    return f"the delay of the links takes {cost}: messages wait for each other, not for bandwidth"


def _claim_cable(evidence: Evidence, ledger: StepAccount) -> None:
    names = slow_cables(evidence.facts, evidence.needs)
    if not names:
        return
    serves = any(name.startswith("server") for name in names)
    ledger.charge_all("slow-cable", QUEUEING if serves else BANDWIDTH)
    if evidence.late is not None and evidence.late.reason == "link":
        ledger.charge_all("slow-cable", WAIT)


def _claim_link(evidence: Evidence, ledger: StepAccount) -> None:
    ledger.charge_all("slow-link", BANDWIDTH)
    if evidence.late is not None and evidence.late.reason == "link":
        ledger.charge_all("slow-link", WAIT)


def _cable_in_words(evidence: Evidence, cost: str) -> str:
    facts, needs = evidence.facts, evidence.needs
    names = slow_cables(facts, needs)
    own = format_bandwidth(facts.links[names[0]].bandwidth_bits_per_second)
    usual = format_bandwidth(usual_rate(facts, names))
    seconds = max(max(needs.out[name], needs.into[name]) for name in names if name in needs.out)
    subject = f"the cable of {names[0]} is slow"
    if len(names) > 1:
        subject = f"the cables of {joined(names)} are slow"
    costs = "it costs" if len(names) == 1 else "they cost"
    text = f"{subject}: {own} where the others have {usual}; {costs} {cost}"
    return text + idle_in_words(evidence, seconds)


def _link_in_words(evidence: Evidence, cost: str) -> str:
    facts, needs = evidence.facts, evidence.needs
    text = f"the link is too slow for this exchange, which takes {cost}"
    if not needs.out:
        return text
    name = busiest_worker_link(needs)
    seconds = max(needs.out[name], needs.into[name])
    cable = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
    text += f": {name}'s {cable} link is busy {limits.busy(facts, seconds):.0%} of the time"
    return text + idle_in_words(evidence, seconds)


def _uplink_in_words(evidence: Evidence, cost: str) -> str:
    facts, needs = evidence.facts, evidence.needs
    rack, seconds = max(needs.uplinks.items(), key=lambda pair: pair[1])
    assert facts.uplink is not None
    rate = format_bandwidth(facts.uplink.bandwidth_bits_per_second)
    text = f"the uplink between the racks is too slow for this exchange, which takes {cost}: the "
    text += f"{rate} uplink of {rack} is busy {limits.busy(facts, seconds):.0%} of the time"
    return text + idle_in_words(evidence, seconds)


def _against_slow_link(evidence: Evidence) -> Iterator[Action]:
    yield from against_bytes(evidence)
    yield faster_links(evidence)
    yield larger_batch(evidence, 2)


def _against_uplink(evidence: Evidence) -> Iterator[Action]:
    facts, needs = evidence.facts, evidence.needs
    assert facts.uplink is not None
    if len(set(facts.racks.values())) < len(facts.workers) and not facts.architecture.averaging:
        text = "exchange between racks less often: average:every=8 trains differently, and "
        text += "`paceline compare` says by how much"
        change = architecture_of(spec.Average(every=8))
        rarer = with_exchange(needs, 1 / 8)
        yield Action(text=text, gain=gain(needs, rarer), change={**change, "servers": 0})
    yield larger_batch(evidence, 2)
    yield from rarer_averages(evidence)
    rate = 10 * facts.uplink.bandwidth_bits_per_second
    faster = scaled_uplinks(needs, 0.1)
    if server_of(evidence) is not None:
        faster = replace(faster, overlap=served_overlap(facts))
    written: dict[str, object] = {"uplink": f"{rate / 1e6:g}mbit"}
    text = f"join the racks by uplinks of {format_bandwidth(rate)}"
    yield Action(text=text, gain=gain(needs, faster), change=written, effort="money")
    text = "put all members that exchange into one rack"
    yield Action(text=text, gain=gain(needs, scaled_uplinks(needs, 0.0)), effort="money")


def _against_latency(evidence: Evidence) -> Iterator[Action]:
    yield from nearer(evidence)
    yield from fewer_rounds(evidence)
    yield larger_batch(evidence, 2)


CAUSES = (
    CauseRule(
        name="slow-cable",
        title="one cable is slower than the others, or a few are",
        proof="rates of the cables, bytes counted",
        claim=_claim_cable,
        priority=60,
        accounts=(BANDWIDTH, QUEUEING),
        sentence=_cable_in_words,
        advice=better_cables,
    ),
    CauseRule(
        name="uplink",
        title="bytes between racks take longer than computing hides",
        proof="bytes counted, the racks of the hosts, rate of the uplink",
        claim=charge_rest("uplink", UPLINK),
        priority=62,
        accounts=(UPLINK,),
        sentence=_uplink_in_words,
        advice=_against_uplink,
    ),
    CauseRule(
        name="slow-link",
        title="the bytes of a step take longer than computing hides",
        proof="bytes counted, rate of the cable",
        claim=_claim_link,
        priority=64,
        accounts=(BANDWIDTH,),
        sentence=_link_in_words,
        advice=_against_slow_link,
    ),
    CauseRule(
        name="latency",
        title="messages wait for each other, not for bandwidth",
        proof="delay of the cables, rounds",
        claim=charge_rest("latency", LATENCY),
        priority=66,
        accounts=(LATENCY,),
        sentence=_latency_in_words,
        advice=_against_latency,
    ),
)
