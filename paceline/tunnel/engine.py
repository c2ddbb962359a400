"""The engine `tunnel`: the same members as `here`, on emulated hosts, links and accelerators.

Hosts are built, every link is measured, and members are started inside by the launcher that starts
them anywhere else. Each member records its own host's interface; this process changes links when a
fault says so, and leaves nothing behind.
"""

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from paceline import spec
from paceline.diagnose.supervision import watch
from paceline.errors import SpecError
from paceline.launch import Identity, MemberCommand, Output, reserve
from paceline.launch.faults import Faults, check_faults
from paceline.launch.identity import member_name
from paceline.launch.restarts import live
from paceline.record import RecordedEvent, RunFolder
from paceline.record.following import Progress, StepCounter, recorded
from paceline.session.commands import command
from paceline.spec.hosts import PlacedHost, host_of, place
from paceline.spec.profile import REAL_DEVICE, find_profile
from paceline.tunnel.hosts import HostPlan, Tunnel
from paceline.tunnel.namespaces import call_in, require_rights
from paceline.tunnel.verify import LinkCheck, measure_links
from paceline.units import format_bandwidth


def tunnel(
    experiment: spec.Experiment,
    path: Path,
    *,
    output: Output,
    progress: Progress,
) -> RunFolder:
    """Run the experiment on emulated hosts."""
    require_rights()
    check(experiment)
    hosts = place(experiment)
    with network_for(experiment, hosts) as network:
        checks = measure_links(network)
        folder = RunFolder.create(path, experiment)
        _describe(folder, experiment, checks)
        faults = _faults(experiment, folder, network, hosts)
        links = _link_faults(experiment, folder, network)
        first = hosts[0].name

        def life() -> None:
            with (
                _coordinator(network, first) as coordinator,
                call_in(network.namespace(first), partial(_reserved, network, first)) as reserved,
            ):
                identities = _identities(experiment, folder, network, hosts, coordinator, reserved)
                commands = [_command(experiment, identity, network) for identity in identities]
                watch(
                    commands,
                    folder,
                    faults,
                    output=output,
                    progress=progress,
                    also=links,
                    dilation=experiment.cluster.dilation,
                    goes_on=experiment.cluster.goes_on,
                )

        cluster = experiment.cluster
        with recorded(folder):
            live(folder, cluster.restarts, life, again=faults.new_life, dilation=cluster.dilation)
            faults.check_happened()
    return folder


def check(experiment: spec.Experiment) -> None:
    """Raise SpecError, before anything is built, for what these hosts and devices cannot do."""
    hosts = place(experiment)
    _check_faults(experiment, hosts)
    if experiment.workload.script is not None:
        return
    check_devices(experiment, hosts)
    devices = sorted({host.device for host in hosts} - {REAL_DEVICE})
    if experiment.architecture.staging is not None and devices:
        problem = f"a pipeline's stages compute for real, and {devices[0]} is emulated."
        fix = "leave --device out (hosts and links are emulated all the same), or ask --on predict."
        raise SpecError("--architecture", problem, fix)


def _reserved(network: Tunnel, host: str) -> socket.socket:
    return reserve(network.address(host))


def _faults(
    experiment: spec.Experiment, folder: RunFolder, network: Tunnel, hosts: Sequence[PlacedHost]
) -> Faults:
    """Those that members suffer; links change by themselves."""
    by_member = {member: host for host in hosts for member in host.members}

    def cut(member: str) -> Callable[[], None]:
        name = by_member[member].name
        network.plug(name, "down")
        return lambda: network.plug(name, "up")

    here = [fault for fault in experiment.faults if fault.kind in ("kill", "cut")]
    by_device: list[spec.Fault] = []
    for fault in experiment.faults:
        if fault.kind in ("pause", "slow"):
            (by_device if _has_device(by_member, fault.member) else here).append(fault)
    dilation = experiment.cluster.dilation
    return Faults(here, folder, cut=cut, dilation=dilation, by_device=by_device)


def _has_device(by_member: Mapping[str, PlacedHost], member: str) -> bool:
    """Whether the member computes on an emulated device, which pauses at the very step."""
    return by_member[member].device != REAL_DEVICE and member.startswith("worker")


def network_for(experiment: spec.Experiment, hosts: Sequence[PlacedHost]) -> Tunnel:
    """The hosts and cables of an experiment, to be entered; dilated where it says so."""
    return Tunnel(_plans(experiment, hosts), _uplink(experiment))


def check_devices(experiment: spec.Experiment, hosts: Sequence[PlacedHost]) -> None:
    """Raise SpecError, before anything is built, for a device that has no profile of the model."""
    workload = experiment.workload
    with_workers = (host for host in hosts if any(m.startswith("worker") for m in host.members))
    for device in sorted({host.device for host in with_workers} - {REAL_DEVICE}):
        find_profile(device, workload.model, workload.precision)


def _check_faults(experiment: spec.Experiment, hosts: Sequence[PlacedHost]) -> None:
    """Raise SpecError for a fault that would silently not happen."""
    check_faults(experiment)
    by_member = {member: host for host in hosts for member in host.members}
    for fault in experiment.faults:
        if fault.kind == "slow" and not _has_device(by_member, fault.member):
            where = f"[[faults]], slow at step {fault.at_step}"
            problem = f"{fault.member} has no emulated device to act on."
            raise SpecError(where, problem, "give its host a device such as k80.")


def _plans(experiment: spec.Experiment, hosts: Sequence[PlacedHost]) -> list[HostPlan]:
    dilation = experiment.cluster.dilation
    return [
        HostPlan(name=host.name, link=_dilated(host.link, dilation), rack=host.rack)
        for host in hosts
    ]


def _uplink(experiment: spec.Experiment) -> spec.Link | None:
    cluster = experiment.cluster
    if not cluster.uplink:
        return None
    return _dilated(spec.parse_link(cluster.uplink, "[cluster], uplink"), cluster.dilation)


def _dilated(link: spec.Link, dilation: float) -> spec.Link:
    return spec.Link(
        bandwidth_bits_per_second=link.bandwidth_bits_per_second / dilation,
        latency_seconds=link.latency_seconds * dilation,
    )


def _coordinator(network: Tunnel, host: str) -> socket.socket:
    """A listening socket inside the first host; worker 0 inherits it for the store."""
    address = network.address(host)
    return call_in(network.namespace(host), lambda: socket.create_server((address, 0), backlog=128))


def _identities(
    experiment: spec.Experiment,
    folder: RunFolder,
    network: Tunnel,
    hosts: Sequence[PlacedHost],
    coordinator: socket.socket,
    reserved: socket.socket,
) -> list[Identity]:
    """Who every member is: its host's name and address, its number there."""
    workers, servers = experiment.cluster.workers, experiment.num_servers
    address, port = coordinator.getsockname()
    key, identities = secrets.token_hex(32), []
    by_member = {member: host for host in hosts for member in host.members}
    for index in range(workers + servers):
        name = member_name(index, workers)
        host = by_member[name]
        identities.append(
            Identity(
                index=index,
                workers=workers,
                servers=servers,
                host=host.name,
                address=network.address(host.name),
                coordinator=f"{address}:{port}",
                coordinator_descriptor=coordinator.fileno() if index == 0 else -1,
                local_index=host.members.index(name),
                local_members=len(host.members),
                local_workers=sum(member.startswith("worker") for member in host.members),
                master="{}:{}".format(*reserved.getsockname()),
                launcher="paceline",
                run=str(folder.path.absolute()),
                key=key,
                owns_interfaces=True,
                goes_on=experiment.cluster.goes_on,
            )
        )
    return identities


def _command(experiment: spec.Experiment, identity: Identity, network: Tunnel) -> MemberCommand:
    """The member's ordinary command, started inside its host."""
    threads = experiment.cluster.threads or 1
    made = command(identity, experiment, threads=threads, interface="eth0")
    # torch looks up names of peers in the log only; emulated hosts have none to find.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **made.environment}
    argv = tuple(network.command(identity.host, made.argv))
    return msgspec.structs.replace(made, argv=argv, environment=environment)


def _describe(folder: RunFolder, experiment: spec.Experiment, checks: Sequence[LinkCheck]) -> None:
    """Put what is emulated into the record, with the rates as measured."""
    worst = max((abs(check.off_fraction) for check in checks), default=0.0)
    rates = sorted({check.asked_bits_per_second for check in checks})
    shown = ", ".join(format_bandwidth(rate) for rate in rates)
    _note(folder, f"tunnel: links of {shown}, measured within {worst:.1%} before the run")
    dilation = experiment.cluster.dilation
    if dilation != 1:
        text = f"dilation {dilation:g}: links and emulated devices ran that much slower; "
        _note(folder, text + "times and rates are reported as if they had not")


def _note(folder: RunFolder, text: str, kind: str = "note", step: int | None = None) -> None:
    now = time.monotonic() / folder.experiment().cluster.dilation
    folder.add_event(
        RecordedEvent(time_seconds=now, member="tunnel", kind=kind, text=text, step=step)
    )


def _link_faults(
    experiment: spec.Experiment, folder: RunFolder, network: Tunnel
) -> list[StepCounter]:
    """One follower for each link that changes at a step of the member it belongs to."""
    followers = []
    for fault in experiment.faults:
        if fault.kind != "link":
            continue
        link = _dilated(spec.parse_link(fault.link, "[[faults]]"), experiment.cluster.dilation)
        host = host_of(experiment, fault.member).name
        change = _LinkChange(network, folder, host, link, fault.at_step)
        follows = fault.member if fault.member.startswith("worker") else "worker0"
        followers.append(StepCounter(folder, change, follows))
    return followers


class _LinkChange:
    """Gives a host's cable another rate, once, when its member has done enough steps."""

    def __init__(
        self, network: Tunnel, folder: RunFolder, host: str, link: spec.Link, at_step: int
    ) -> None:
        self._network, self._folder, self._host = network, folder, host
        self._link, self._at_step, self._done = link, at_step, False

    def __call__(self, steps: int) -> None:
        if self._done or steps < self._at_step:
            return
        self._done = True
        self._network.reshape(self._host, self._link)
        text = f"link of {self._host} now {format_bandwidth(self._link.bandwidth_bits_per_second)}"
        _note(self._folder, text, "link", steps)
