"""Hosts: a network namespace each, on the bridge of their rack; both directions of every cable
shaped.

    host worker0          switch                              host server0
    ┌──────────┐   up    ┌──────────────────────────┐  down   ┌──────────┐
    │ eth0 tbf ├────────►│ bridge of the rack       │         │          │
    │          │◄────────┤ port tbf        port tbf ├────────►│ eth0     │
    └──────────┘  down   └──────────────────────────┘         └──────────┘

What leaves a host is shaped inside it, what goes to it at the switch's port. The switch is a
namespace too, so nothing of a tunnel touches this machine's own network, and two tunnels cannot
meet. Several racks hang on a core bridge, each by one shaped uplink. IPv6 is off and neighbours are
known from the start, so that only members' own packets are counted.
"""

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from paceline.errors import PacelineError, SpecError
from paceline.spec import Link
from paceline.telemetry.queues import QueueCount, QueueCounters
from paceline.tunnel import delay, links
from paceline.tunnel.namespaces import Lease, call_in, ip, require_rights, sweep, tc

SWITCH = "switch"
_NETWORK_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """A host to build: its name, its cable, and the rack it stands in."""

    name: str
    link: Link
    rack: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTraffic:
    """What a host has sent and received over its cable."""

    sent: QueueCount
    received: QueueCount


class Tunnel:
    """Emulated hosts for as long as the `with` block lasts; nothing of them is left after it."""

    def __init__(self, plans: Sequence[HostPlan], uplink: Link | None = None) -> None:
        self.plans = {plan.name: plan for plan in plans}
        self.racks = sorted({plan.rack for plan in plans})
        self.uplink = uplink
        if len(self.racks) > 1 and uplink is None:
            problem = f"hosts stand in {len(self.racks)} racks, and no uplink joins them."
            raise SpecError("[cluster]", problem, 'add uplink = "1gbit".')
        self._ports = {name: f"port{index}" for index, name in enumerate(self.plans)}

    def __enter__(self) -> "Tunnel":
        require_rights()
        sweep()
        self._on_terminate = _exit_on_terminate()
        self.lease = Lease()
        self._relays: list[delay.Relay] = []
        self._counters: dict[str, QueueCounters] = {}
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tear_down()

    def namespace(self, host: str) -> str:
        return self.lease.name(host)

    def address(self, host: str) -> str:
        """IPv4 address of a host; the switch has one on every rack's bridge, for measuring."""
        return _address(list(self.plans).index(host))

    def rack_address(self, rack: str) -> str:
        """Address of the bridge of `rack`: a peer that only the host's own cable separates."""
        return f"10.77.255.{self.racks.index(rack) + 1}"

    def bridge(self, rack: str) -> str:
        return f"rack{self.racks.index(rack)}"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside `host`."""
        return ["ip", "netns", "exec", self.namespace(host), *argv]

    def port(self, host: str) -> str:
        """The switch's interface at the other end of the host's cable."""
        return self._ports[host]

    def sent_by(self, namespace: str, interface: str) -> QueueCount:
        """What an interface of a host or of the switch has sent until now."""
        out, _ = self._counters[namespace].read()
        return out[interface]

    def traffic(self) -> dict[str, HostTraffic]:
        """What every host has sent and received until now."""
        at_switch, _ = self._counters[SWITCH].read()
        traffic = {}
        for name, port in self._ports.items():
            traffic[name] = HostTraffic(sent=self.sent_by(name, "eth0"), received=at_switch[port])
        return traffic

    def reshape(self, host: str, link: Link) -> None:
        """Give a host's cable another rate while it runs; its latency stays."""
        plan = self.plans[host]
        changed = Link(
            bandwidth_bits_per_second=link.bandwidth_bits_per_second,
            latency_seconds=plan.link.latency_seconds,
        )
        links.shape(self.namespace(host), "eth0", changed, "change")
        links.shape(self.namespace(SWITCH), self._ports[host], changed, "change")
        links.read_back(self.namespace(host), {"eth0": changed})

    def plug(self, host: str, state: Literal["up", "down"]) -> None:
        """Pull a host's cable out of the switch, or put it back."""
        ip(batch=[f"link set {self._ports[host]} {state}"], namespace=self.namespace(SWITCH))

    def _build(self) -> None:
        names = [SWITCH, *self.plans]
        ip(batch=[f"netns add {self.namespace(name)}" for name in names])
        widest = max(links.window_bytes(plan.link) for plan in self.plans.values())
        delayed = any(plan.link.latency_seconds for plan in self.plans.values())
        buffers = links.buffer_settings(widest, delayed=delayed)
        for name in names:
            call_in(self.namespace(name), lambda: _tune(buffers))
        switch = self.namespace(SWITCH)
        ip(batch=self._switch_commands(), namespace=switch)
        use_netem = delayed and delay.netem_available(switch)
        for index, plan in enumerate(self.plans.values()):
            self._build_host(index, plan, use_netem)
        expected = {port: self.plans[name].link for name, port in self._ports.items()}
        expected |= dict(self._uplink_ends())
        tc(
            batch=[links.shape_command(end, link) for end, link in expected.items()],
            namespace=switch,
        )
        links.read_back(switch, expected)
        self._counters = {name: call_in(self.namespace(name), QueueCounters) for name in names}

    def _switch_commands(self) -> list[str]:
        quiet = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        commands = ["link set lo up"]
        for index, rack in enumerate(self.racks):
            bridge = self.bridge(rack)
            commands += [
                f"link add {bridge} address {_bridge_mac(index)} {quiet}",
                f"address add {self.rack_address(rack)}/{_NETWORK_BITS} dev {bridge}",
                f"link set {bridge} up",
            ]
        if len(self.racks) > 1:
            commands += [f"link add core {quiet}", "link set core up"]
        for index in range(len(self._uplink_ends()) // 2):
            commands += [
                f"link add up{index} type veth peer name core{index}",
                f"link set up{index} master rack{index} up",
                f"link set core{index} master core up",
            ]
        return commands

    def _uplink_ends(self) -> list[tuple[str, Link]]:
        """Both ends of each rack's cable to the core; none where there is one rack."""
        if self.uplink is None or len(self.racks) < 2:
            return []
        ends = [end for index in range(len(self.racks)) for end in (f"up{index}", f"core{index}")]
        return [(end, self.uplink) for end in ends]

    def _build_host(self, index: int, plan: HostPlan, use_netem: bool) -> None:
        namespace, switch = self.namespace(plan.name), self.namespace(SWITCH)
        port, bridge = self._ports[plan.name], self.bridge(plan.rack)
        if plan.link.latency_seconds and not use_netem:
            self._relays.append(delay.Relay(namespace, "eth0", switch, port, plan.link))
        else:
            ip("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch,
               namespace=namespace)  # fmt: skip
        ip("link", "set", port, "master", bridge, "up", namespace=switch)
        known = {_address(other): _mac(other) for other in range(len(self.plans)) if other != index}
        # Bridges of several racks share one namespace, which may answer for the wrong one.
        known |= {self.rack_address(rack): _bridge_mac(i) for i, rack in enumerate(self.racks)}
        neighbours = [
            f"neighbour add {address} lladdr {mac} dev eth0 nud permanent"
            for address, mac in known.items()
        ]
        bring_up = [
            "link set lo up",
            f"link set eth0 address {_mac(index)}",
            f"address add {_address(index)}/{_NETWORK_BITS} dev eth0",
            "link set eth0 up",
        ]
        ip(batch=[*bring_up, *neighbours], namespace=namespace)
        shape = links.shape_command("eth0", plan.link)
        tc(batch=[shape, *links.count_commands("eth0")], namespace=namespace)
        if plan.link.latency_seconds and use_netem:
            tc(batch=[delay.netem_command("eth0", plan.link)], namespace=namespace)
        links.read_back(namespace, {"eth0": plan.link})

    def _tear_down(self) -> None:
        for counters in self._counters.values():
            counters.close()
        for relay in self._relays:
            relay.close()
        self.lease.release()
        if self._on_terminate is not None:
            signal.signal(signal.SIGTERM, self._on_terminate)


def _exit_on_terminate() -> Any:
    """Let SIGTERM end this process by way of its `finally` blocks; returns what it did before.

    None where it already does something else, or where this is not the main thread.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        return None

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    return before


def _address(index: int) -> str:
    if index >= 60_000:
        raise PacelineError(f"{index + 1} hosts are more than one tunnel has addresses for")
    return f"10.77.{index // 250}.{index % 250 + 1}"


def _mac(index: int) -> str:
    return f"02:70:6c:00:{index >> 8:02x}:{index & 0xFF:02x}"


def _bridge_mac(index: int) -> str:
    return _mac(0xFF00 + index)


def _tune(buffers: Mapping[str, str]) -> None:
    """Settings of the namespace this thread is in: no IPv6, TCP buffers that fit the links."""
    settings = {
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv6/conf/default/disable_ipv6": "1",
        **{f"ipv4/{name}": value for name, value in buffers.items()},
        # Without drops windows fill the buffers and stay there. reno is the one that every
        # namespace may choose.
        "ipv4/tcp_congestion_control": "reno",
        "ipv4/tcp_no_metrics_save": "1",
        # A burst from a bridge may be answered through another rack's.
        "ipv4/conf/all/rp_filter": "0",
        "ipv4/conf/default/rp_filter": "0",
    }
    for name, value in settings.items():
        path = Path("/proc/sys/net") / name
        if path.exists():
            path.write_text(value, encoding="ascii")
