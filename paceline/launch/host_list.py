"""Members without a launcher: the same command, typed on each host of a list, finds its place."""

import platform
import socket
from collections.abc import Mapping, Sequence

from paceline.errors import SpecError
from paceline.launch import interfaces
from paceline.launch.identity import Identity


def from_hosts(hosts: Sequence[str], port: int, environ: Mapping[str, str]) -> Identity:
    """Return the identity of this host's member: one per host, in the order listed; the first
    coordinates, at `port`."""
    where, own = "--hosts", interfaces.this_network().addresses
    if len(hosts) < 2 or len(set(hosts)) < len(hosts):
        problem = f'"{",".join(hosts)}" is not a list of two or more different hosts.'
        raise SpecError(where, problem, "write --hosts a,b,c, the same on each of them.")
    mine = [i for i, host in enumerate(hosts) if host == platform.node() or _resolve(host) in own]
    if len(mine) != 1:
        known = ", ".join(address for address in own if not interfaces.is_loopback(address))
        found = "none" if not mine else " and ".join(hosts[i] for i in mine)
        problem = f"this host ({platform.node()}, {known}) is {found} of the hosts listed."
        fix = "list every host once, by an address the others can reach, and run this on each."
        raise SpecError(where, problem, fix)
    (index,) = mine
    return Identity(
        index=index,
        workers=len(hosts),
        host=hosts[index],
        address=interfaces.choose(environ, towards=hosts[not index], on_one_host=False).address,
        coordinator=f"{hosts[0]}:{port}",
        launcher="hosts",
        key=environ.get("PACELINE_KEY", ""),
    )


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""
