"""The same experiment with something changed: more workers, servers, another link, no straggler.

Hosts that were written out are kept consistent: adding workers adds hosts of the first kind, and
those that differ stay as they are.
"""

import math
from typing import Any

import msgspec

from paceline import spec
from paceline.errors import SpecError


def vary(experiment: spec.Experiment, **changes: Any) -> spec.Experiment:
    """`spec.replace`, with hosts that follow `workers` and `servers`, and `slowdown` for all.

    Given hosts are taken as they are, and `workers` and `servers` follow them.
    """
    cluster = experiment.cluster
    if "hosts" in changes:
        hosts = list(changes.pop("hosts"))
        members = {
            "workers": sum(host.count * host.workers for host in hosts),
            "servers": sum(host.count * host.servers for host in hosts),
        }
        return vary(spec.replace(experiment, hosts=tuple(hosts), **members), **changes)
    hosts = list(cluster.hosts)
    if hosts and "workers" in changes:
        hosts = _with_workers(hosts, changes["workers"])
    if hosts and "servers" in changes:
        hosts = _with_servers(hosts, changes["servers"])
    if "slowdown" in changes:
        slowdown = changes.pop("slowdown")
        hosts = [msgspec.structs.replace(host, slowdown=slowdown) for host in hosts]
    if "link" in changes:
        hosts = [msgspec.structs.replace(host, link="") for host in hosts]
    if hosts:
        changes["hosts"] = tuple(hosts)
    return spec.replace(experiment, **changes)


def _with_workers(hosts: list[spec.Host], workers: int) -> list[spec.Host]:
    """Hosts as they are written, in their order, until there are enough workers; a part of one
    where they do not divide, and more of the first kind that computes where they do not suffice."""
    computing = [host for host in hosts if host.workers]
    if workers == sum(host.count * host.workers for host in computing):
        return hosts
    rest = [host for host in hosts if not host.workers]
    filled: list[spec.Host] = []
    left = workers - sum(host.count * host.workers for host in computing)
    if left > 0:
        more = math.ceil(left / computing[0].workers)
        if len(computing) == 1:
            computing = [msgspec.structs.replace(computing[0], count=computing[0].count + more)]
        else:
            computing.append(msgspec.structs.replace(computing[0], count=more))
    for host in computing:
        whole = min(host.count, workers // host.workers)
        if whole:
            filled.append(msgspec.structs.replace(host, count=whole))
        workers -= whole * host.workers
        if workers and whole < host.count:
            filled.append(msgspec.structs.replace(host, count=1, workers=workers))
            workers = 0
    serving = sum(host.count * host.servers for host in hosts)
    kept = sum(host.count * host.servers for host in (*filled, *rest))
    if serving != kept:
        return _with_servers([*filled, *rest], serving)
    return [*filled, *rest]


def _with_servers(hosts: list[spec.Host], servers: int) -> list[spec.Host]:
    """As many servers on the hosts that have some, one each on new hosts beyond."""
    computing = [msgspec.structs.replace(host, servers=0) for host in hosts if host.workers]
    beside = any(host.servers for host in hosts if host.workers)
    if not beside:
        apart = next((host for host in hosts if not host.workers), spec.Host())
        alone = msgspec.structs.replace(apart, count=max(1, servers), workers=0, servers=1)
        return [*computing, alone] if servers else computing
    placed: list[spec.Host] = []
    for host in computing:
        serving = min(host.count, servers)
        servers -= serving
        if serving:
            placed.append(msgspec.structs.replace(host, count=serving, servers=1))
        if host.count > serving:
            placed.append(msgspec.structs.replace(host, count=host.count - serving))
    if servers:
        problem = f"{servers} servers more than hosts that compute."
        raise SpecError("[[cluster.hosts]]", problem, "write hosts for them.")
    return placed
