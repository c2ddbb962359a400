"""Which architecture, with which settings, for a goal: every sensible one predicted and ranked.

A budget is a number of hosts. Dedicated servers take hosts of their own out of it, so that they
must earn what the workers they replace would have brought. Only architectures that train like one
worker on the whole batch are ranked; a faster one that does not is a remark.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from paceline import spec
from paceline.errors import SpecError
from paceline.predict.answer import Predicted, predict, simulate
from paceline.predict.outcome import Outcome, rate_text
from paceline.predict.stacks import Stack

Goal = Literal["throughput", "time", "cost"]
NEAR = 1.10
"""Candidates within this of the best are predicted with an interval; the others need none."""

COMPRESSION_PAYS = 1.03
MOST_HOSTS = 100_000


class Advised(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture with its settings, and how it would do."""

    architecture: str
    workers: int
    servers: int
    samples_per_second: float
    low: float
    high: float
    limited_by: str
    seconds: float | None = None
    """For the samples asked for."""

    cost: float | None = None
    left_out: str = ""
    """Hosts of the budget that would only hold the others up."""

    why: str = ""
    """Why it is not the first."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking, and what was found out on the way."""

    goal: str
    ranked: list[Advised]
    remarks: list[str]


def advise(
    experiment: spec.Experiment,
    hosts: int,
    *,
    goal: Goal = "throughput",
    num_samples: float = 0.0,
    host_price_per_hour: float = 0.0,
    stack: Stack | None = None,
) -> Advice:
    """Rank what fits on `hosts` hosts like the experiment's, the best for `goal` first.

    `time` and `cost` are those of `num_samples`; a cost needs a price. `stack`: with the constants
    of a machine.
    """
    if hosts > MOST_HOSTS:
        problem = f"{hosts} hosts are more than advice is given for."
        raise SpecError("--hosts", problem, f"write at most {MOST_HOSTS}.")
    tried = [(e, simulate(e, stack)) for e in candidates(experiment, hosts)]
    tried.sort(key=lambda pair: -_merit(pair[1], pair[0], goal))
    alike = [pair for pair in tried if pair[0].architecture.exclusive]
    best = _merit(alike[0][1], alike[0][0], goal)
    near = [pair for pair in alike if _merit(pair[1], pair[0], goal) * NEAR >= best]
    kept = near[:6] if len(near) >= 3 else alike[:3]
    budget = _hosts_of(experiment, hosts)
    ranked = [
        _advised(e, predict(e, stack), budget, num_samples, host_price_per_hour) for e, _ in kept
    ]
    ranked = [ranked[0], *(_compared(other, ranked[0]) for other in ranked[1:])]
    return Advice(goal=goal, ranked=ranked, remarks=_remarks(tried))


def without_servers(experiment: spec.Experiment) -> spec.Experiment:
    """Its workers by `ring`: what is advised decides which hosts serve."""
    hosts = [h for h in experiment.cluster.hosts if h.workers]
    return spec.replace(
        experiment,
        architecture=spec.Ring(),
        servers=0,
        hosts=tuple(msgspec.structs.replace(host, servers=0) for host in hosts),
    )


def choose(experiment: spec.Experiment) -> tuple[spec.Architecture, str] | None:
    """What `auto` is on this very cluster, with the reason; None where it cannot be predicted.

    Members are given here: with servers it is a matter of their placement.
    """
    cluster, servers = experiment.cluster, experiment.num_servers
    kinds: list[spec.Architecture] = [spec.Ring(), spec.Server(placement="colocated")]
    if servers:
        kinds = [spec.Server(), spec.Server(placement="optimal")]
    elif any(host.workers > 1 for host in cluster.hosts):
        kinds.append(spec.Hybrid())
    try:
        tried = [
            (simulate(spec.replace(experiment, architecture=kind)).samples_per_second, kind)
            for kind in kinds
        ]
    except SpecError:
        return None
    (best, first), (rate, second), *_ = sorted(tried, key=lambda pair: -pair[0])
    more = f"{best / rate - 1:.0%} more than {spec.format_architecture(second)}"
    return first, f"it is predicted to give {rate_text(best)} samples/s, {more}"


def _merit(outcome: Outcome, experiment: spec.Experiment, goal: Goal) -> float:
    """More is better. Every host of the budget costs, used or not; fewer cost less."""
    if goal != "cost":
        return outcome.samples_per_second
    return outcome.samples_per_second / _hosts_used(experiment)


def _hosts_used(experiment: spec.Experiment) -> int:
    return sum(host.count for host in experiment.cluster.hosts)


def candidates(experiment: spec.Experiment, hosts: int) -> Iterator[spec.Experiment]:
    """Everything worth a simulation on so many hosts.

    Hosts are those that the experiment writes; servers take the slowest of them. Where some are
    slower than others, or have a slower cable, to leave those out is a candidate too.
    """
    quick_first, quick, wide = _ordered(experiment, _hosts_of(experiment, hosts))
    yield _on(experiment, spec.Single(), [_with_one(quick_first[0])])
    both = [host for host in quick if host in wide]
    sets = [quick_first, quick, wide, both]
    for number, some in enumerate(sets):
        if some and some not in sets[:number]:
            yield from _everyone_computes(experiment, some)
    yield from _some_serve(experiment, quick_first, len(quick))
    if len(wide) < hosts:
        yield from _some_serve(experiment, wide, len(both))


def _ordered(
    experiment: spec.Experiment, hosts: Sequence[spec.Host]
) -> tuple[list[spec.Host], list[spec.Host], list[spec.Host]]:
    """All hosts, the quickest first; of them those whose devices are the quickest; and those with
    the fastest cables."""

    def pace(host: spec.Host) -> float:
        alone = [_with_one(host)]
        return simulate(_on(experiment, spec.Single(), alone)).step_seconds

    def rate(host: spec.Host) -> float:
        link = host.link or experiment.cluster.link
        return spec.parse_link(link, "[cluster]").bandwidth_bits_per_second if link else 0.0

    paces, rates = {h: pace(h) for h in set(hosts)}, {h: rate(h) for h in set(hosts)}
    ordered = sorted(hosts, key=lambda host: (paces[host], -rates[host]))
    quick = [host for host in ordered if paces[host] == min(paces.values())]
    wide = [host for host in ordered if rates[host] == max(rates.values())]
    return ordered, quick, wide


def _some_serve(
    experiment: spec.Experiment, quick_first: Sequence[spec.Host], num_quick: int
) -> Iterator[spec.Experiment]:
    """`num_quick`: where some are slower, that just those serve is a candidate."""
    hosts = len(quick_first)
    for servers in sorted({1, 2, hosts // 4, hosts // 3, hosts // 2, hosts - num_quick}):
        if not 0 < servers < hosts:
            continue
        computing, slow = quick_first[:-servers], quick_first[-servers:]
        serving = [
            msgspec.structs.replace(host, workers=0, servers=1, slowdown=1.0, jitter_fraction=0.0)
            for host in slow
        ]
        yield _on(experiment, spec.Server(), [*computing, *serving])
        if sum(host.workers for host in computing) > servers:
            yield _on(experiment, spec.Server(placement="optimal"), [*computing, *serving])


def _everyone_computes(
    experiment: spec.Experiment, hosts: Sequence[spec.Host]
) -> Iterator[spec.Experiment]:
    workers = sum(host.workers for host in hosts)
    if workers == 1:
        return
    yield _on(experiment, spec.Ring(), hosts)
    yield _on(experiment, spec.Server(placement="colocated"), hosts)
    if workers > len(hosts) > 1:
        yield _on(experiment, spec.Hybrid(), hosts)
    for every in (4, 16):
        yield _on(experiment, spec.Average(every=every), hosts)


def _hosts_of(experiment: spec.Experiment, hosts: int) -> list[spec.Host]:
    """So many of the hosts that compute, one by one; beyond those that are written, more of the
    first kind."""
    written = [
        msgspec.structs.replace(host, count=1, servers=0)
        for host in experiment.cluster.hosts
        if host.workers
        for _ in range(min(host.count, hosts))
    ] or [spec.Host()]
    return [*written[:hosts], *[written[0]] * (hosts - len(written))]


def _with_one(host: spec.Host) -> spec.Host:
    return msgspec.structs.replace(host, workers=1)


def _on(
    experiment: spec.Experiment, kind: spec.Architecture, hosts: Sequence[spec.Host]
) -> spec.Experiment:
    """The experiment by `kind` on these hosts; neighbours that are alike are written as one."""
    alike = [msgspec.structs.replace(host, count=len(list(same))) for host, same in groupby(hosts)]
    return spec.replace(
        experiment,
        architecture=kind,
        workers=sum(host.workers for host in hosts),
        servers=sum(host.servers for host in hosts),
        hosts=tuple(alike),
        shares=(),
    )


def _advised(
    experiment: spec.Experiment,
    found: Predicted,
    budget: Sequence[spec.Host],
    num_samples: float,
    price_per_hour: float,
) -> Advised:
    seconds = num_samples / found.samples_per_second if num_samples else None
    cost = None
    if seconds is not None and price_per_hour:
        cost = seconds / 3600 * price_per_hour * _hosts_used(experiment)
    return Advised(
        architecture=spec.format_architecture(experiment.architecture),
        workers=experiment.cluster.workers,
        servers=experiment.num_servers,
        samples_per_second=found.samples_per_second,
        low=found.low,
        high=found.high,
        limited_by=found.limit,
        seconds=seconds,
        cost=cost,
        left_out=_left_out(experiment, budget),
    )


def _left_out(experiment: spec.Experiment, budget: Sequence[spec.Host]) -> str:
    """The hosts of the budget that are not used, where they are unlike those that are."""
    used, cluster = experiment.cluster.hosts, experiment.cluster
    if _hosts_used(experiment) == len(budget) or experiment.architecture.is_one_process:
        return ""
    kinds = Counter((host.device, host.slowdown, host.link) for host in budget)
    kinds.subtract({(h.device, h.slowdown, h.link): h.count for h in used if h.workers})
    found = []
    for (device, slowdown, link), count in kinds.items():
        slower = f" at 1/{slowdown:g} of its speed" if slowdown != 1.0 else ""
        what = f"{device or cluster.device}{slower}, {link or cluster.link}".removesuffix(", ")
        if count > 0:
            found.append(f"{count} of {what}")
    return "; ".join(found)


def _compared(other: Advised, first: Advised) -> Advised:
    """Why it stands behind the first."""
    slower = 1 - other.samples_per_second / first.samples_per_second
    reasons = [f"{slower:.0%} slower" if slower > 0.005 else "as fast"]
    if other.workers < first.workers:
        fewer = first.workers - other.workers
        reasons.append(f"{fewer} fewer {'worker computes' if fewer == 1 else 'workers compute'}")
    reasons.append(f"limited by {other.limited_by}")
    if other.high >= first.low:
        reasons.append("the intervals overlap: measure both")
    return msgspec.structs.replace(other, why="; ".join(reasons))


def _remarks(tried: list[tuple[spec.Experiment, Outcome]]) -> list[str]:
    found = (_servers_needed(tried), _compression(tried), _otherwise(tried))
    return [text for text in found if text]


def _otherwise(tried: list[tuple[spec.Experiment, Outcome]]) -> str:
    """The fastest of all, where it is faster because it trains differently."""
    experiment, outcome = max(tried, key=lambda pair: pair[1].samples_per_second)
    if experiment.architecture.exclusive:
        return ""
    name = spec.format_architecture(experiment.architecture)
    rate = f"{rate_text(outcome.samples_per_second)} samples/s"
    return f"{name} would give {rate}, but its updates are not those of the whole batch."


def _servers_needed(tried: list[tuple[spec.Experiment, Outcome]]) -> str:
    """How many dedicated servers are best, if any are."""
    dedicated = [
        (outcome.samples_per_second, e.num_servers)
        for e, outcome in tried
        if (server := e.architecture.serves_workers) is not None
        and server.mode == "sync"
        and server.placement == "dedicated"
    ]
    if not dedicated:
        return ""
    rate, servers = max(dedicated)
    plural = "server is" if servers == 1 else "servers are"
    return f"Of dedicated servers {servers} {plural} best here, {rate_text(rate)} samples/s."


def _compression(tried: list[tuple[spec.Experiment, Outcome]]) -> str:
    """Up to which rate of links 16-bit gradients pay, for the best synchronous server."""
    served = [
        (e, outcome)
        for e, outcome in tried
        if (server := e.architecture.serves_workers) is not None and server.mode == "sync"
    ]
    if not served:
        return ""
    experiment, _ = max(served, key=lambda pair: pair[1].samples_per_second)
    if any(host.link for host in experiment.cluster.hosts):
        return ""  # there is no one rate of links to speak of
    packed = experiment.architecture.changed(compression="fp16")
    paying = []
    for gbit in (0.3, 1, 3, 10, 30):
        plain = spec.replace(experiment, link=f"{gbit}gbit")
        smaller = spec.replace(plain, architecture=packed)
        rates = [simulate(e, coarse=True).samples_per_second for e in (smaller, plain)]
        if rates[0] / rates[1] >= COMPRESSION_PAYS:
            paying.append(gbit)
    if not paying:
        return "16-bit gradients (compression=fp16) do not pay at any link rate here."
    return f"16-bit gradients (compression=fp16) pay up to links of about {max(paying):g} Gbit/s."
