"""What one step needs of every worker, link and server, and how long a step with other needs takes.

This is the one place that makes promises. It knows closed forms only: the slowest worker's own
time, the busiest link or server, the delay of the links; and from the measured step how much of the
exchange was hidden behind computing. What a change would give is stated as a range, because how
much of the *next* exchange would be hidden is not known.
"""

import math
from dataclasses import dataclass, field, replace

from paceline.explain.facts import Facts, own_seconds
from paceline.explain.findings import Gain

INITIAL_WINDOW_BYTES = 14_600
"""What TCP sends before the first acknowledgement; it doubles with every round trip."""

NOISE, SPREAD = 0.05, 0.155
"""Two runs of one experiment differ by about `NOISE` on a machine that has other things to do. A
range reaches `SPREAD` beyond what the closed forms give, as a logarithm of throughput: so wide were
gains at first sight, each kind of situation left out in turn (benchmarks/gains.py)."""

SERVED_OVERLAP = 0.9
"""Share of forward and backward behind which chunks travel at best, where each goes as soon as it
is made and is waited for when it is used: a model of many like layers comes near, one large layer
hides 0.4. A ring's buckets wait until they are full: what its own run hid is all that is known."""

Wire = dict[str, float]
"""Member -> seconds per step."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Seconds per step."""

    own: Wire
    """What each worker does alone: input, compute, overhead."""

    out: Wire
    """How long each member's cable is busy with what it sends."""

    into: Wire
    serving: Wire
    """How long each server works."""

    uplinks: Wire = field(default_factory=dict)
    """How long each rack's uplink is busy in its busier direction."""

    latency: float
    """Messages that must follow one another, times the delay of the cables."""

    slow_start: float
    """How long TCP takes to find the rate of links with that delay, at most."""

    cpu: float
    """CPU time of all members over the cores of their machine; 0 where hosts are real."""

    chance: float
    """Waiting for whoever is last, where nobody is slower than the rest."""

    exposed: float
    """As measured: exchange that nothing hid."""

    paused: float
    together: bool
    typical: str
    overlap: float = 0.0
    """How much of an exchange computing can hide, where another placement frees it to do so."""

    cores: int = 0
    """Of the machine that all members share; 0 where they do not."""

    @property
    def pace(self) -> float:
        """Own time of the worker that the others wait for, or of the typical one."""
        return max(self.own.values()) if self.together else self.own[self.typical]

    @property
    def busiest(self) -> float:
        """The longest need of a link, an uplink or a server."""
        wires = (self.out, self.into, self.serving, self.uplinks)
        return max((seconds for wire in wires for seconds in wire.values()), default=0.0)

    @property
    def exchange(self) -> float:
        return self.busiest + self.latency

    @property
    def step(self) -> float:
        """As measured, pauses aside."""
        return self.pace + self.chance + self.exposed

    def of_role(self, role: str) -> float:
        """The longest need of the workers' (or servers') links; servers' work included."""
        serves = role == "server"  # all others are workers, whatever they are called
        wires = (self.out, self.into)
        found = [s for wire in wires for m, s in wire.items() if m.startswith("server") == serves]
        if role == "server":
            found += self.serving.values()
        return max(found, default=0.0)


def needs_of(facts: Facts) -> Needs:
    """What a step of this run needed, from its record."""
    typical = facts.typical
    own = {worker.name: own_seconds(worker) for worker in facts.workers}
    pace = max(own.values()) if facts.together else own[typical.name]
    out, into = _wires(facts)
    delay, slow_start = _delays(facts, max((*out.values(), *into.values()), default=0.0))
    exposed = typical.phases["exchange_exposed"] if facts.exchanges else 0.0
    used = [facts.traffic[m.name].cpu_seconds for m in facts.members if m.name in facts.traffic]
    known = [seconds for seconds in used if seconds is not None]
    # Own time, wait and exposure are measured on one worker and the pace on another: what is left
    # between them is chance, and never less than nothing.
    return Needs(
        own=own,
        out=out,
        into=into,
        serving=_serving(facts),
        uplinks=_uplinks(facts),
        latency=delay,
        slow_start=slow_start,
        cpu=sum(known) / facts.cores if facts.cores and len(known) == len(facts.members) else 0.0,
        chance=max(0.0, typical.step_seconds - pace - exposed),
        exposed=exposed,
        paused=typical.paused_seconds,
        together=facts.together,
        typical=typical.name,
        cores=facts.cores if known else 0,
    )


def served_overlap(facts: Facts) -> float:
    """How much of an exchange with servers the typical worker's computing can hide."""
    return SERVED_OVERLAP * (facts.typical.phases["forward"] + facts.typical.phases["backward"])


def step_range(now: Needs, then: Needs) -> tuple[float, float]:
    """The shortest and the longest step to expect with the needs `then`, pauses included.

    As many seconds of the exchange stay hidden as are now, or as large a share of it, or as many as
    the architecture can hide; and what the closed forms leave unexplained stays, or shrinks with
    the exchange.
    """
    hidden = max(0.0, now.exchange - now.exposed)
    left = max(0.0, now.exposed - now.exchange)
    shrinks = then.exchange / now.exchange if now.exchange > 0 else 1.0
    room = then.pace / now.pace if now.pace > 0 else 1.0  # longer computing hides more
    exposures = []
    for behind in (hidden, hidden * room, max(hidden, then.overlap) * max(1.0, room)):
        open_part = max(0.0, then.exchange - min(behind, then.pace))
        exposures += [open_part + left, open_part + left * min(1.0, shrinks)]
    if shrinks <= 1:
        exposures.append(now.exposed * shrinks)
    least = max(then.pace, then.exchange, _cpu_left(now, then)) + then.paused
    # Who is last by chance is often last because of the exchange before.
    waits = (then.chance, then.chance * min(1.0, shrinks))
    times = [
        max(least, then.pace + wait + exposed + then.paused)
        for exposed in exposures
        for wait in waits
    ]
    return min(times), max(times)


def _cpu_left(now: Needs, then: Needs) -> float:
    """What workers no longer do leaves the cores to the others, where it was what filled them."""
    if not now.cores:
        return then.cpu
    spared_seconds = sum(seconds - then.own[name] for name, seconds in now.own.items())
    return max(0.0, then.cpu - max(0.0, spared_seconds) / now.cores)


def gain(now: Needs, then: Needs, samples_factor: float = 1.0) -> Gain:
    """By how much throughput rises with the needs `then` and so many times the samples a step."""
    low, high = step_range(now, then)
    whole = (now.step + now.paused) * samples_factor
    return Gain(
        low=whole / (high * math.exp(SPREAD)) - 1,
        high=whole / max(low * math.exp(-SPREAD), 1e-9) - 1,
    )


def spared(needs: Needs, least: float, most: float) -> Gain:
    """The gain when each step is shorter by between `least` and `most` seconds."""
    step = needs.step + needs.paused
    return Gain(
        low=step / ((step - least) * math.exp(SPREAD)) - 1,
        high=step / max((step - most) * math.exp(-SPREAD), 1e-9) - 1,
    )


def scaled_links(needs: Needs, factor: float) -> Needs:
    """Every link and uplink busy `factor` times as long."""
    return replace(
        scaled_uplinks(needs, factor),
        out={name: factor * seconds for name, seconds in needs.out.items()},
        into={name: factor * seconds for name, seconds in needs.into.items()},
    )


def scaled_uplinks(needs: Needs, factor: float) -> Needs:
    """Every uplink busy `factor` times as long."""
    return replace(needs, uplinks={name: factor * s for name, s in needs.uplinks.items()})


def _uplinks(facts: Facts) -> Wire:
    """How long each rack's uplink is busy with what its members exchange with other racks."""
    if facts.uplink is None:
        return {}
    rate = facts.uplink.bandwidth_bits_per_second / 8
    out: Wire = dict.fromkeys(sorted(set(facts.racks.values())), 0.0)
    into = dict(out)
    for member, traffic in facts.traffic.items():
        rack = facts.racks[member]
        to, from_ = _peers(facts, member)
        out[rack] += traffic.bytes_sent * sum(s for p, s in to.items() if facts.racks[p] != rack)
        into[rack] += traffic.bytes_received * sum(
            share for peer, share in from_.items() if facts.racks[peer] != rack
        )
    return {rack: max(out[rack], into[rack]) / rate for rack in out}


def _peers(facts: Facts, member: str) -> tuple[Wire, Wire]:
    """Shares of what a member sends that go to each peer, and of what it receives."""
    workers = [worker.name for worker in facts.workers]
    kind = facts.architecture
    if (kind.is_all_reduce or kind.averaging is not None) and member in workers:
        place = workers.index(member)
        return {workers[(place + 1) % len(workers)]: 1.0}, {workers[place - 1]: 1.0}
    servers = {m.name: m.counters.get("served_bytes") for m in facts.members}
    held = {n: float(b) for n, b in servers.items() if isinstance(b, int | float) and n != member}
    whole = sum(held.values())
    if member in workers and whole:
        shares = {name: size / whole for name, size in held.items()}
    else:
        others = [name for name in workers if name != member]
        shares = dict.fromkeys(others, 1 / max(1, len(others)))
    return shares, shares


def _wires(facts: Facts) -> tuple[Wire, Wire]:
    known = [m.name for m in facts.members if m.name in facts.traffic and m.name in facts.links]
    rates = {name: facts.links[name].bandwidth_bits_per_second / 8 for name in known}
    out = {name: facts.traffic[name].bytes_sent / rates[name] for name in known}
    into = {name: facts.traffic[name].bytes_received / rates[name] for name in known}
    return out, into


def _serving(facts: Facts) -> Wire:
    """What servers work in a step: their CPU time where it is known, as they have one thread."""
    found = {}
    for member in facts.servers:
        traffic = facts.traffic.get(member.name)
        cpu = traffic.cpu_seconds if traffic is not None else None
        known = [s for s in (cpu, facts.serving.get(member.name)) if s is not None]
        if known:
            found[member.name] = max(known)
    return found


def _delays(facts: Facts, busiest_seconds: float) -> tuple[float, float]:
    """Delay of the messages that follow one another, and TCP's slow start on such links."""
    if not facts.links or not facts.exchanges:
        return 0.0, 0.0
    one_way = max(link.latency_seconds for link in facts.links.values())  # the sender's cable's
    rate = max(link.bandwidth_bits_per_second for link in facts.links.values()) / 8
    doublings = math.log2(1 + busiest_seconds * rate / INITIAL_WINDOW_BYTES)
    return (rounds(facts) or 0.0) * one_way, 2 * one_way * doublings


def rounds(facts: Facts) -> float | None:
    """Messages of a step's exchange that must follow one another; None where its architecture does
    not say."""
    hosts = {member.host for member in facts.members if member.role == "worker"}
    return facts.architecture.rounds(facts.summary.workers, len(hosts))
