"""Members on a Ray cluster: one actor for each, which starts it as a process on its node.

Ray places and reaches the nodes; the members are the same commands as everywhere. What travels
through Ray is trusted as far as the Ray cluster is, and it carries no gradients.
"""

import os
import platform
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import DeadlineError, Interrupted, MemberError, MissingError
from paceline.launch.identity import Identity, from_paceline, to_environment
from paceline.launch.interruption import INTERRUPT_SECONDS, Interruption
from paceline.launch.last_words import LastWords, ending, first_cause, is_settled
from paceline.launch.ports import reserve
from paceline.launch.process import (
    GRACE_SECONDS,
    MemberCommand,
    Output,
    Process,
    end_all,
    open_log,
)

PLACE_SECONDS = 60.0
POLL_SECONDS = 0.2
REACH_SECONDS = 5.0
PASSED_ON = ("PACELINE_", "OMP_", "MKL_", "TORCH", "GLOO_", "NCCL_", "PYTHON")
"""Prefixes of the variables that mean the same on another node. Ray sets CUDA's itself."""


class RayMember(msgspec.Struct, frozen=True, kw_only=True):
    """The node on which Ray has put one member."""

    host: str
    address: str
    port: int
    """A port that the member's actor listens on, and hands over to it."""

    master_port: int
    """A port that the actor keeps free for the script's own use."""


class MemberActor:
    """Lives on a member's node, as a Ray actor: starts it, passes on what it prints, ends it."""

    def __init__(self) -> None:
        import ray

        address = ray.util.get_node_ip_address()
        self._listener = socket.create_server((address, 0))
        self._reserved = reserve(address)
        self._place = RayMember(
            host=platform.node(),
            address=address,
            port=self._listener.getsockname()[1],
            master_port=self._reserved.getsockname()[1],
        )
        self._process: Process | None = None
        self._said: list[tuple[str, bytes]] = []

    def place(self) -> bytes:
        return msgspec.json.encode(self._place)

    def start(self, content: bytes, driver_python: str, files: dict[str, bytes]) -> None:
        """Start the member; `files` make its run folder where the driver's is not seen."""
        command = msgspec.json.decode(content, type=MemberCommand)
        identity = from_paceline(command.environment)
        assert identity is not None, "our own launchers name the member"
        if identity.run and not Path(identity.run).exists():
            _write(Path(identity.run), files)
        descriptors: tuple[int, ...] = ()
        if identity.index == 0:
            descriptors = (self._listener.fileno(),)
            identity = msgspec.structs.replace(identity, coordinator_descriptor=descriptors[0])
        told = {n: v for n, v in command.environment.items() if n.startswith(PASSED_ON)}
        program, *arguments = command.argv
        command = MemberCommand(
            name=command.name,
            argv=(sys.executable if program == driver_python else program, *arguments),
            environment={**os.environ, **told, **to_environment(identity)},
            descriptors=descriptors,
        )
        self._process = Process(command, self._hear, LastWords())

    def _hear(self, member: str, stream: str, content: bytes) -> None:
        self._said.append((stream, content))

    def poll(self) -> tuple[list[tuple[str, bytes]], int | None]:
        """Return what was printed since the last call, and the exit status once there is one."""
        assert self._process is not None, "start comes first"
        self._process.read_all()
        self._process.pass_on_parts()
        status = self._process.popen.returncode if self._process.done else None
        said, self._said = self._said, []
        return said, status

    def signal(self, number: int) -> None:
        assert self._process is not None, "start comes first"
        self._process.signal(number)

    def files(self, folder: str, member: str) -> dict[str, bytes]:
        """Return the files that the member has recorded."""
        found = Path(folder, "members").glob(f"{member}.*")
        return {f"members/{path.name}": path.read_bytes() for path in found}

    def end(self) -> None:
        if self._process is not None:
            end_all([self._process])
        self._listener.close()
        self._reserved.close()


class Placed:
    """Members that have their places on the cluster and wait to be started."""

    def __init__(self, actors: Sequence[Any], places: Sequence[RayMember], cores: int) -> None:
        self._actors, self.places = actors, places
        self.cores = cores
        """Cores that Ray keeps for each member."""

    def identities(self, workers: int, run: Path) -> list[Identity]:
        """Return the identity of each member on its node."""
        members, key = len(self.places), secrets.token_hex(32)
        seen: Counter[tuple[str, str]] = Counter()
        hosts = [(place.host, place.address) for place in self.places]
        first = self.places[0]
        identities = []
        for index, (place, host) in enumerate(zip(self.places, hosts, strict=True)):
            identities.append(
                Identity(
                    index=index,
                    workers=workers,
                    servers=members - workers,
                    host=place.host,
                    address=place.address,
                    coordinator=f"{first.address}:{first.port}",
                    local_index=seen[host],
                    local_members=hosts.count(host),
                    local_workers=hosts[:workers].count(host),
                    master=f"{first.address}:{first.master_port}",
                    launcher="paceline",
                    run=str(run),
                    key=key,
                )
            )
            seen[host] += 1
        return identities

    def supervise(
        self,
        commands: Sequence[MemberCommand],
        folder: Path,
        *,
        output: Output,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all members to their end; the first to fail ends the others and is raised."""
        import ray

        files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        files |= {"members/.here": b""}
        started = [
            actor.start.remote(msgspec.json.encode(command), sys.executable, files)
            for actor, command in zip(self._actors, commands, strict=True)
        ]
        ray.get(started, timeout=PLACE_SECONDS)
        members = [
            _Member(actor, command, folder, output)
            for actor, command in zip(self._actors, commands, strict=True)
        ]
        with Interruption() as interruption:
            while any(member.status is None for member in members):
                _look(members, tick)
                if interruption.received:
                    _interrupt(members, tick, interruption)
                    raise Interrupted(interruption.received[0])
                _raise_first_cause(members)


class _Member:
    """One member as the driver knows it: what it has printed so far, and how it ended."""

    def __init__(self, actor: Any, command: MemberCommand, folder: Path, output: Output) -> None:
        self.actor, self.command = actor, command
        self._folder, self._output = folder, output
        self.words = LastWords()
        self.status: int | None = None
        self.ended_at = 0.0

    def look(self, now: float) -> None:
        """Ask what it printed since the last time, and whether it has ended."""
        import ray

        try:
            said, status = ray.get(self.actor.poll.remote(), timeout=PLACE_SECONDS)
        except ray.exceptions.RayError as error:
            what = f"its Ray node or actor was lost: {type(error).__name__}"
            raise MemberError(self.command.name, 1, [what]) from None
        for stream, content in said:
            self.words.add(stream, content, now)
            with open_log(self._folder / "logs" / f"{self.command.name}.log") as log:
                log.write(content)
            self._output(self.command.name, stream, content)
        if status is not None:
            self.status, self.ended_at = status, now
            self._fetch()

    def _fetch(self) -> None:
        """Bring an ended member's record here, unless it was written here."""
        import ray

        name = self.command.name
        if not (self._folder / "members" / f"{name}.json").exists():
            files = self.actor.files.remote(str(self._folder), name)
            _write(self._folder, ray.get(files, timeout=PLACE_SECONDS))


def _look(members: Sequence[_Member], tick: Callable[[], None]) -> None:
    time.sleep(POLL_SECONDS)
    now = time.monotonic()
    for member in members:
        if member.status is None:
            member.look(now)
    tick()


def _raise_first_cause(members: Sequence[_Member]) -> None:
    failed = [ending(m.command.name, m.status, m.ended_at, m.words) for m in members if m.status]
    if not failed:
        return
    running = sum(member.status is None for member in members)
    since = min(member.ended_at for member in members if member.status)
    if is_settled(failed, running, time.monotonic() - since):
        raise first_cause(failed, {m.command.name: m.ended_at for m in members if m.status == 0})


def _interrupt(
    members: Sequence[_Member], tick: Callable[[], None], interruption: Interruption
) -> None:
    """Interrupt as on this machine: workers get time to save, and a second signal ends it."""
    workers = [member for member in members if not member.command.serves]
    for member in workers:
        member.actor.signal.remote(interruption.received[0])
    until = time.monotonic() + INTERRUPT_SECONDS
    while any(member.status is None for member in workers) and time.monotonic() < until:
        if len(interruption.received) > 1:
            break
        _look(members, tick)


@contextmanager
def placed(members: int, *, cores: int = 0, gpus: int = 0) -> Iterator[Placed]:
    """A place on the Ray cluster for each member; given back, with all processes ended, after.

    `cores` and `gpus` are for each member; without `cores` they share what the cluster has.
    """
    environment = dict(os.environ)
    ray = _connect()
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = cores or cores_each([node.get("CPU", 0.0) for node in nodes], members)
    bundle = {"CPU": cores, **({"GPU": gpus} if gpus else {})}
    group = placement_group([bundle] * members, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(PLACE_SECONDS):
            have = ", ".join(f"{node.get('CPU', 0):g} cores" for node in nodes)
            raise DeadlineError(f"placing {members} x {bundle} on Ray ({have})", PLACE_SECONDS, [])
        for index in range(members):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": cores, "num_gpus": gpus, "scheduling_strategy": strategy}
            actors.append(ray.remote(MemberActor).options(**options).remote())
        found = ray.get([actor.place.remote() for actor in actors], timeout=PLACE_SECONDS)
        places = [msgspec.json.decode(place, type=RayMember) for place in found]
        yield Placed(actors, places, cores)
    finally:
        ended = [actor.end.remote() for actor in actors]
        ray.wait(ended, num_returns=len(ended), timeout=2 * GRACE_SECONDS) if ended else None
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
        ray.shutdown()
        os.environ.pop("PYTHONBREAKPOINT", None)  # Ray puts its own debugger there
        os.environ.update(environment)


def cores_each(node_cores: Sequence[float], members: int) -> int:
    """The most whole cores every member can have; 1 when there are fewer cores than members."""
    most = int(max(node_cores, default=1))
    for cores in range(most, 1, -1):
        if sum(int(have // cores) for have in node_cores) >= members:
            return cores
    return 1


def _connect() -> Any:
    try:
        import ray
    except ImportError:
        fix = "install the extra: `pip install paceline[ray]`."
        raise MissingError("ray is not installed here.", fix) from None
    fix = "start one (`ray start --head`), or set RAY_ADDRESS to one that runs."
    host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself asks an address that nobody answers for minutes
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError) as error:
        raise MissingError(f"no Ray cluster answers: {error}", fix) from None
    return ray


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
