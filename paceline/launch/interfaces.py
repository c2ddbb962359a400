"""Which of this host's addresses the other members should use, and why.

Host names resolve to 127.0.1.1 on many machines, and the first interface is often a container
bridge: so the kernel's route to the coordinator decides, and where it cannot, nothing is guessed.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Mapping

import msgspec
import psutil

from paceline.errors import SpecError

ELSEWHERE = "198.51.100.1"
"""An address that no host has (RFC 5737): the route to it is the default route."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """An address to be reached at."""

    address: str
    interface: str
    """Empty when no interface of this host carries the address."""

    why: str


class HostNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this host's network; a test makes its own."""

    addresses: Mapping[str, str]
    """IPv4 address -> interface, of the interfaces that are up."""

    route: Callable[[str], str | None]
    """The own address that packets to a host leave from; None when there is no route."""


def choose(
    environ: Mapping[str, str],
    *,
    towards: str,
    on_one_host: bool,
    network: HostNetwork | None = None,
) -> Choice:
    """The address for this member: as told, or loopback, or on the way to host `towards`."""
    network = network or this_network()
    told = environ.get("PACELINE_ADDRESS", "")
    if told:
        return _as_told(told, network)
    if on_one_host:
        return _choice("127.0.0.1", "all members are on this host", network)
    if towards:
        source = network.route(towards)
        if source is not None and not is_loopback(source):
            return _choice(source, f"packets to worker0 at {towards} leave from it", network)
    source = network.route(ELSEWHERE)
    if source is not None and not is_loopback(source):
        return _choice(source, "it carries the default route", network)
    outward = [address for address in network.addresses if not is_loopback(address)]
    if len(outward) == 1:
        return _choice(outward[0], "it is the only one that leads out of this host", network)
    have = ", ".join(f"{name} {address}" for address, name in network.addresses.items()) or "none"
    problem = f"cannot tell which address the other hosts should use; there are: {have}."
    raise SpecError("network", problem, "set PACELINE_ADDRESS to an interface's name or address.")


def is_loopback(host: str) -> bool:
    """Return whether a name or address can only mean the host itself, on any host that reads it."""
    if host in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def this_network() -> HostNetwork:
    states = psutil.net_if_stats()
    addresses = {
        address.address: name
        for name, listed in psutil.net_if_addrs().items()
        for address in listed
        if address.family == socket.AF_INET and name in states and states[name].isup
    }
    return HostNetwork(addresses=addresses, route=source_towards)


def source_towards(host: str) -> str | None:
    """The own address that packets to `host` would leave from. Sends nothing but a name query."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def _as_told(told: str, network: HostNetwork) -> Choice:
    by_name = {name: address for address, name in network.addresses.items()}
    address = by_name.get(told, told)
    if address not in network.addresses:
        have = ", ".join(f"{name} {address}" for address, name in network.addresses.items())
        problem = f'"{told}" is neither an interface nor an address of this host.'
        raise SpecError("PACELINE_ADDRESS", problem, f"one of: {have}.")
    return _choice(address, "PACELINE_ADDRESS says so", network)


def _choice(address: str, why: str, network: HostNetwork) -> Choice:
    return Choice(address=address, interface=network.addresses.get(address, ""), why=why)
