"""How long a library's collective takes: one modelled action, for no decision of ours is inside.

An all-reduce of M bytes over n workers moves 2(n-1)/n of them over every link of a ring; around it
goes each hop's latency twice. A tree moves 2M and has its depth in hops. Workers of one host are
neighbours in the ring, so a host's cable carries the ring once, however many devices it has.
"""

import math
from collections.abc import Sequence

from paceline.predict.stacks import Constants
from paceline.predict.topology import Topology, rate_of

INSIDE_HOP = 1 / 3
"""Of a hop between hosts."""


def all_reduce_seconds(
    size_bytes: float, topology: Topology, constants: Constants, algorithms: Sequence[str]
) -> float:
    """The fastest of the algorithms the library has."""
    if topology.workers == 1:
        return 0.0
    ways = {"ring": ring_seconds, "tree": tree_seconds}
    found = min(ways[name](size_bytes, topology, constants) for name in algorithms)
    negotiation = constants.negotiation_seconds * topology.workers
    return constants.launch_seconds + negotiation + found


def ring_seconds(size_bytes: float, topology: Topology, constants: Constants) -> float:
    workers, hosts = topology.workers, topology.computing_hosts
    inside_hops = workers - hosts
    hop = constants.hop_seconds
    seconds = 2 * inside_hops * INSIDE_HOP * hop
    if hosts > 1:
        seconds += 2 * hosts * (hop + topology.latency_seconds)
    return seconds + 2 * (workers - 1) / workers * size_bytes / _rate(topology, constants)


def tree_seconds(size_bytes: float, topology: Topology, constants: Constants) -> float:
    """Devices of a host as a chain, hosts as a binary tree; up and down."""
    workers, hosts = topology.workers, topology.computing_hosts
    hop = constants.hop_seconds
    seconds = 2 * (math.ceil(workers / hosts) - 1) * INSIDE_HOP * hop
    if hosts > 1:
        seconds += 2 * math.ceil(math.log2(hosts)) * (hop + topology.latency_seconds)
    return seconds + 2 * size_bytes / _rate(topology, constants)


def host_sum_seconds(size_bytes: float, topology: Topology, constants: Constants) -> float:
    """Devices of a host lay `size_bytes` each into its memory and read the sum back."""
    devices = max(c.workers for c in topology.computing)
    if devices == 1:
        return 0.0
    return 2 * devices * size_bytes / rate_of(topology.inside, constants)


def _rate(topology: Topology, constants: Constants) -> float:
    """Payload bytes per second through the narrowest part of the ring."""
    rates = []
    if topology.computing_hosts > 1:
        rates.append(topology.network_rate(constants))
        if any(c.link.kind == "tcp" for c in topology.computing):
            rates.append(constants.process_rate)
    if topology.workers > topology.computing_hosts:
        rates.append(rate_of(topology.inside, constants))
    return min(rates)
