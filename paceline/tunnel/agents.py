"""Network agents started for the length of one measurement: in emulated hosts, or on loopback."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from paceline.spec import Link
from paceline.tunnel import netpipe
from paceline.tunnel.hosts import HostPlan, Tunnel
from paceline.tunnel.namespaces import call_in
from paceline.tunnel.verify import measure_links


def tunnel_pairs(hosts: int, link: Link, sizes_bytes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure every pair of `hosts` emulated hosts with cables like `link`."""
    plans = [HostPlan(name=f"host{index}", link=link) for index in range(hosts)]
    key = secrets.token_hex(16)
    with Tunnel(plans) as network:
        measure_links(network)
        agents = {plan.name: (network.address(plan.name), netpipe.DEFAULT_PORT) for plan in plans}
        inside = [network.command(name, _agent(address)) for name, address in agents.items()]
        first = network.namespace("host0")
        with _started(inside, key):
            # Asked from inside a host: no address of the tunnel exists outside of it.
            call_in(first, lambda: netpipe.wait_for(agents, key))
            for pair in netpipe.pairs(agents):
                yield call_in(first, lambda: netpipe.ask_pair(agents, *pair, sizes_bytes, key))  # noqa: B023


def local_pairs(sizes_bytes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure between two processes of this machine."""
    key, agents = secrets.token_hex(16), {}
    for name in ("process0", "process1"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            agents[name] = ("127.0.0.1", int(free.getsockname()[1]))
    with _started((_agent(address) for address in agents.values()), key):
        netpipe.wait_for(agents, key)
        for pair in netpipe.pairs(agents):
            yield netpipe.ask_pair(agents, *pair, sizes_bytes, key)


def _agent(address: tuple[str, int]) -> list[str]:
    return [sys.executable, "-m", "paceline.tunnel.netpipe", f"{address[0]}:{address[1]}"]


@contextmanager
def _started(commands: Iterable[Sequence[str]], key: str) -> Iterator[None]:
    """Agents run inside the block and are gone after it."""
    environment = {**os.environ, "PACELINE_KEY": key}
    with ExitStack() as stack:
        for argv in commands:
            agent = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
            stack.callback(_end, agent)
        yield


def _end(agent: "subprocess.Popen[bytes]") -> None:
    agent.kill()
    agent.wait()
