"""Run a peer: start its processes (its servers too), end them, leave a run folder like ours."""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from paceline import architectures, spec
from paceline.bench.peers import Peer, versions
from paceline.bench.peers.export import export
from paceline.bench.peers.job import VARIABLE
from paceline.errors import SpecError
from paceline.launch import (
    Identity,
    MemberCommand,
    Output,
    member_name,
    share_cores,
    supervise,
    to_environment,
)
from paceline.record import PHASES, RecordedEvent, RunFolder, summarise
from paceline.spec.hosts import place
from paceline.tunnel.engine import network_for
from paceline.tunnel.verify import measure_links

PACKAGE_ROOT = Path(__file__).resolve().parents[3]
DEADLINE_SECONDS = 1800.0


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """Where one member of a peer runs."""

    host: str
    address: str
    prefix: tuple[str, ...] = ()
    """Words before its command line, such as those that enter a network namespace."""

    owns_interfaces: bool = False


def run(
    experiment: spec.Experiment,
    peer: Peer,
    path: Path,
    *,
    python: str = sys.executable,
    output: Output = lambda member, stream, content: None,
    tick: Callable[[], None] = lambda: None,
) -> RunFolder:
    """Train `experiment` with `peer` and leave its record in `path`, which must not exist.

    The experiment's architecture gives way to the peer's own; its engine says where members run.
    """
    found = versions(peer, python)
    experiment = adapt(experiment, peer)
    cores = share_cores(experiment.cluster.workers)
    threads = experiment.cluster.threads or len(cores[0]) or len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-peer-")))
        places = stack.enter_context(placed(experiment, peer))
        addresses = _addresses(places)
        export(experiment, work, addresses=addresses, threads=threads)
        folder = RunFolder.create(path, experiment)
        shown = ", ".join(f"{name} {version}" for name, version in found.items())
        text = f"measured with a peer, {peer.title} ({shown}), not with Paceline"
        if peer.is_ours:
            text = f"measured with {peer.title} ({shown})"
        folder.add_event(RecordedEvent(time_seconds=0.0, member="worker0", kind="note", text=text))
        commands = [
            _command(peer, identity, python, work, threads, cores, prefix=place.prefix)
            for identity, place in zip(
                _identities(experiment, places, addresses, path), places, strict=True
            )
        ]
        if peer.by_horovodrun:
            commands = [_horovodrun(commands[0], python, experiment.cluster.workers)]
        status = "failed"
        try:
            supervise(
                commands,
                output=output,
                tick=tick,
                deadline_seconds=DEADLINE_SECONDS,
                logs=folder.path / "logs",
            )
            status = "finished"
        finally:
            _summarise(folder, peer, status)
    return folder


@contextmanager
def placed(experiment: spec.Experiment, peer: Peer) -> Iterator[list[Spot]]:
    """A place for every member: workers, servers, then the coordinator, beside worker 0."""
    extra = 1 if peer.takes_servers else 0
    members = experiment.cluster.workers + experiment.num_servers
    if experiment.engine == "here":
        yield [Spot(host=socket.gethostname(), address="127.0.0.1")] * (members + extra)
        return
    hosts = place(experiment)
    with network_for(experiment, hosts) as network:
        measure_links(network)
        by_member = {member: host.name for host in hosts for member in host.members}
        names = [
            by_member[member_name(index, experiment.cluster.workers)] for index in range(members)
        ]
        yield [
            Spot(
                host=name,
                address=network.address(name),
                prefix=tuple(network.command(name, ())),
                owns_interfaces=True,
            )
            for name in [*names, *names[:extra]]
        ]


def _identities(
    experiment: spec.Experiment, places: Sequence[Spot], addresses: Sequence[str], path: Path
) -> list[Identity]:
    workers = experiment.cluster.workers
    together = experiment.engine == "here"
    return [
        Identity(
            index=index,
            workers=workers,
            servers=len(places) - workers,
            host=place.host,
            address=place.address,
            coordinator=addresses[0],
            local_index=index if together else 0,
            local_members=len(places) if together else 1,
            launcher="paceline",
            run=str(path.absolute()),
            owns_interfaces=place.owns_interfaces,
        )
        for index, place in enumerate(places)
    ]


def adapt(experiment: spec.Experiment, peer: Peer) -> spec.Experiment:
    """The experiment as the peer runs it: our architecture that does the same, its own servers."""
    workers, servers = experiment.cluster.workers, experiment.cluster.servers
    if peer.one_worker_only and workers > 1:
        problem = f"{peer.name} is one process, and {workers} workers are asked for."
        raise SpecError("peers", problem, "compare it with 1 worker.")
    if experiment.engine == "predict" or experiment.cluster.device != "cpu":
        problem = "peers compute for real, and cannot be predicted or given an emulated device."
        raise SpecError("peers", problem, "compare them --on here or tunnel, on device cpu.")
    if peer.by_horovodrun and experiment.engine != "here":
        fix = "compare it --on here."
        raise SpecError("peers", "horovodrun starts its workers on this machine only.", fix)
    return spec.replace(
        experiment,
        architecture=peer.like,
        servers=max(1, servers) if peer.takes_servers else 0,
    )


def _addresses(places: Sequence[Spot]) -> tuple[str, ...]:
    """A free port at every place: found and let go, as the frameworks take no open socket.

    A host of its own has all ports free.
    """
    addresses, held = [], ExitStack()
    for index, there in enumerate(places):
        port = 20_000 + index
        if not there.owns_interfaces:
            probe = held.enter_context(socket.socket())
            probe.bind((there.address, 0))
            port = probe.getsockname()[1]
        addresses.append(f"{there.address}:{port}")
    held.close()
    return tuple(addresses)


def _command(
    peer: Peer,
    identity: Identity,
    python: str,
    work: Path,
    threads: int,
    cores: Sequence[tuple[int, ...]],
    *,
    prefix: tuple[str, ...],
) -> MemberCommand:
    environment = {
        **os.environ,
        **to_environment(identity),
        **architectures.to_environment(peer.like),  # for our own exchange under another framework
        VARIABLE: str(work),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(PACKAGE_ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "eth0" if identity.owns_interfaces else "lo",
        "no_proxy": "*",  # a proxy would swallow gRPC's calls between members
    }
    pinned = identity.role == "worker" and not identity.owns_interfaces
    return MemberCommand(
        name=identity.name,
        argv=(*prefix, python, "-m", peer.module),
        environment=environment,
        cores=cores[identity.rank] if pinned else (),
    )


def _horovodrun(first: MemberCommand, python: str, workers: int) -> MemberCommand:
    """Horovod starts its own workers; they find their number in its variables."""
    launcher = str(Path(python).parent / "horovodrun")
    argv = (launcher, "-np", str(workers), "--gloo", *first.argv)
    return MemberCommand(name="horovodrun", argv=argv, environment=first.environment)


def _summarise(folder: RunFolder, peer: Peer, status: str) -> None:
    """The summary under the peer's name, without the phases that nobody could see."""
    summary = summarise(folder, status)
    summary.architecture = peer.name
    if summary.breakdown_seconds is not None:
        names = {m.name for m in summary.members}
        seen = {p for n in names for s in folder.steps(n)[:1] for p in s.breakdown_seconds}
        summary.breakdown_seconds = {
            phase: summary.breakdown_seconds[phase] for phase in PHASES if phase in seen
        }
    folder.write_summary(summary)
