"""Jobs that are besieged: what each trains, on how many members, where it listens, what it uses.

`siege.py` lets strangers loose on them. A job takes steps on the same numbers every time until it
is told which is the last, so that the same job can be done alone afterwards.

    mpirun -n 2 python benchmarks/besieged.py FOLDER      what a worker under mpirun is started as
"""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import strangers
import torch
from strangers import Port
from torch import nn

from paceline import architectures, data, spec
from paceline.builtin import loop
from paceline.record import RunFolder
from paceline.session import start
from paceline.testing import run_members
from paceline.wire import JobKey
from paceline.wire.handshake import Initiator

STEP_SECONDS = 0.1
"""A besieged job leaves the cores to those who besiege it."""

QUIET_SECONDS = 60.0
"""Until then those who called must have been shown the door; mostly it takes none of them."""

GROWTH_FILES = 8
DEADLINE_SECONDS = 3000.0


@dataclass(frozen=True)
class Kind:
    """A kind of job, and which ports it must have."""

    architecture: spec.Architecture
    servers: int
    ports: tuple[str, ...]
    apart: bool = False
    page: bool = False
    goes_on: bool = False
    """With `--on-loss continue`: every worker has a connection to every other one."""

    mpirun: bool = False


JOBS = {
    "tcp": Kind(spec.Server(transport="tcp"), 1, ("server0", "store")),
    "colocated": Kind(spec.Server(placement="colocated"), 0, ("store", "worker0", "worker1")),
    "encrypted": Kind(spec.Server(), 1, ("server0", "store"), apart=True),
    "ring": Kind(spec.Ring(), 0, ("gloo0", "gloo1", "page", "store"), page=True),
    "average": Kind(spec.Average(every=4), 0, ("gloo0", "gloo1", "store")),
    "hybrid": Kind(spec.Hybrid(), 0, ("gloo0", "gloo1", "store"), apart=True),
    "continue": Kind(
        spec.Hybrid(), 0, ("gloo0", "gloo1", "store", "worker0", "worker1"), goes_on=True
    ),
    "pipeline": Kind(spec.Pipeline(), 0, ("gloo0", "gloo1", "store")),
    "mpi": Kind(spec.Ring(), 0, ("store",), mpirun=True),
}


def train_on(session: Any, folder: Path, goes_on: bool = False) -> dict[str, Any]:
    """Steps on the same numbers every time, until the file `last` says which step is the last."""
    session.identity = msgspec.structs.replace(session.identity, goes_on=goes_on)
    torch.manual_seed(0)
    staged = isinstance(session.options, spec.Pipeline)
    model, makes_loss = _stages(session) if staged else _model(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.distribute(model, optimizer)
    losses, longest, then, last = bytearray(), 0.0, time.monotonic(), None
    step, told = 0, folder / "last"
    while last is None or step < last:
        torch.manual_seed(1000 * step + (0 if staged else session.rank))
        optimizer.zero_grad()
        loss = makes_loss()
        optimizer.step()
        losses += struct.pack("<f", loss.item())
        step, now = step + 1, time.monotonic()
        longest, then = max(longest, now - then) if step > 3 else 0.0, now
        if step == 3:
            facts = {"key": session.identity.key, "pid": os.getpid(), "parent": os.getppid()}
            _write(folder / f"worker{session.rank}", json.dumps(facts))
        if step % 10 == 0 and session.rank == 0:
            _write(folder / "progress", str(step))
        if last is None:
            time.sleep(STEP_SECONDS)
            last = int(told.read_text()) if told.exists() else None
    session.architecture.settle()
    weights = [value.detach().numpy().tobytes() for value in model.parameters()]
    finite = all(bool(value.isfinite().all()) for value in model.parameters())
    return {
        "steps": step,
        "losses": bytes(losses),
        "longest_seconds": longest,
        "weights": weights,
        "finite": finite,
    }


def _model(session: Any) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A small model, and what makes its gradients and returns the loss."""
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 3))

    def makes_loss() -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(8, 30)).square().mean()
        loss.backward()
        return loss.detach()

    return model, makes_loss


def _stages(session: Any) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The same of this worker's part of a pipeline: all workers have the whole batch."""
    experiment = spec.replace(
        spec.Experiment(),
        architecture=session.options,
        workers=session.workers,
        model="mnist-dnn",
        data="synthetic",
        global_batch=8,
    )
    dataset = data.open("synthetic", input_shape=(1, 28, 28), num_classes=10)
    model = loop.build_stages(experiment, session.options, session, dataset)

    def makes_loss() -> torch.Tensor:
        inputs, targets = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
        loss: torch.Tensor = model(inputs[model.counted_part(8)], inputs, targets)
        is_last = session.rank == session.workers - 1
        return loss if is_last else torch.zeros(())  # others are told of it at some later time

    return model, makes_loss


def undisturbed(kind: Kind, folder: Path, steps: int) -> list[dict[str, Any]]:
    folder.mkdir()
    _write(folder / "last", str(steps))
    return _members(kind, folder, None)


def _members(kind: Kind, folder: Path, run: RunFolder | None) -> list[dict[str, Any]]:
    if kind.mpirun:
        return _under_mpirun(kind, folder)
    return run_members(
        train_on,
        folder,
        kind.goes_on,
        workers=2,
        servers=kind.servers,
        architecture=kind.architecture,
        timeout_seconds=DEADLINE_SECONDS,
        folder=run,
        apart=kind.apart,
    )


def _under_mpirun(kind: Kind, folder: Path) -> list[dict[str, Any]]:
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    assert program is not None, "mpirun is not installed"
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    member = [sys.executable, __file__, str(folder)]
    command = [program, *as_root, "--oversubscribe", "-n", "2", *member]
    told = {**os.environ, "OMP_NUM_THREADS": "1", **architectures.to_environment(kind.architecture)}
    subprocess.run(command, env=told, check=True, timeout=DEADLINE_SECONDS)
    results = [(folder / f"result{rank}").read_bytes() for rank in range(2)]
    return [msgspec.msgpack.decode(result) for result in results]


def be_worker(folder: Path) -> None:
    """Under mpirun: as any script of a user's."""
    torch.set_num_threads(1)
    session = start.init()
    result = train_on(session, folder)
    (folder / f"result{session.rank}").write_bytes(msgspec.msgpack.encode(result))


def has_mpirun() -> bool:
    return Path(sys.executable).with_name("mpirun").exists() or bool(shutil.which("mpirun"))


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    partial.replace(path)


class Job:
    """`train_on` in a thread's care, while something else is done to it."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        folder.mkdir()
        self._kind, self._folder = kind, folder
        self._results: list[dict[str, Any]] = []
        self._error: BaseException | None = None
        experiment = spec.Experiment(
            architecture=kind.architecture, cluster=spec.Cluster(workers=2, servers=kind.servers)
        )
        self._run = RunFolder.create(folder / "run", experiment) if kind.page else None
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        try:
            self._results = _members(self._kind, self._folder, self._run)
        except BaseException as error:
            self._error = error

    def pids(self) -> dict[str, int]:
        """Process of each member."""
        workers = [json.loads(self._read(f"worker{rank}")) for rank in range(2)]
        found = {f"worker{rank}": int(facts["pid"]) for rank, facts in enumerate(workers)}
        others = psutil.Process(int(workers[0]["parent"])).children()
        servers = sorted(child.pid for child in others if child.pid not in found.values())
        return found | {f"server{number}": pid for number, pid in enumerate(servers)}

    @contextlib.contextmanager
    def page(self) -> Iterator["subprocess.Popen[str] | None"]:
        """The live page of the job, where it has one."""
        if self._run is None:
            yield None
            return
        command = [sys.executable, "-m", "paceline", "watch", str(self._run.path)]
        watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield watch
        finally:
            watch.kill()
            watch.wait()

    def ports(self, page: "subprocess.Popen[str] | None") -> list[Port]:
        """Every port and every abstract socket where a member listens, and the page's."""
        key = JobKey(json.loads(self._read("worker0"))["key"])
        found = []
        for name, pid in self.pids().items():
            process = psutil.Process(pid)
            for connection in process.net_connections("tcp"):
                is_ours = not self._kind.mpirun or connection.family == socket.AF_INET
                if connection.status == psutil.CONN_LISTEN and is_ours:
                    address = (connection.laddr.ip, connection.laddr.port)
                    found += _recognized(name, address, key)
            unix = {connection.laddr for connection in process.net_connections("unix")}
            names = sorted(path[1:] for path in unix if path.startswith("@paceline-"))
            found += [port for path in names for port in _recognized(name, path, key)]
        if page is not None and page.stdout is not None:
            line = page.stdout.readline()
            port = int(line.rpartition("127.0.0.1:")[2].partition("/")[0])
            request = b"GET /events?token=%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            recorded = (request % b"PdYx0e8oRrFQJcE1d3yKzw",)  # another page's
            found.append(Port("page", ("127.0.0.1", port), "http", recorded))
        if self._kind.mpirun:  # what answers nobody is MPI's own
            found = [port for port in found if port.speaks != "shut"]
        return list(_told_apart(found))

    def use(self, page: "subprocess.Popen[str] | None") -> dict[str, int]:
        pids = [*self.pids().values(), *([page.pid] if page is not None else [])]
        processes = [psutil.Process(pid) for pid in pids]
        return {
            "bytes": sum(process.memory_info().rss for process in processes),
            "files": sum(process.num_fds() for process in processes),
            "threads": sum(process.num_threads() for process in processes),
        }

    def quiet(
        self, page: "subprocess.Popen[str] | None", files: int, threads: int = sys.maxsize
    ) -> dict[str, int]:
        """What is used when no more is open than before strangers called, or after a minute."""
        until = time.monotonic() + QUIET_SECONDS
        while True:
            used = self.use(page)
            is_quiet = used["files"] <= files + GROWTH_FILES and used["threads"] <= threads
            if is_quiet or time.monotonic() > until:
                return used
            time.sleep(0.1)

    def pace(self) -> float:
        """Steps a second, now; the job must get on while this looks."""
        began, first = time.monotonic(), int(self._read("progress"))
        while (steps := int(self._read("progress"))) < first + 20:
            if time.monotonic() > began + 120:
                raise AssertionError(f"the job has stood still at step {steps} for two minutes.")
            time.sleep(0.05)
        return (steps - first) / (time.monotonic() - began)

    def finish(self) -> list[dict[str, Any]]:
        if self._error is None:
            _write(self._folder / "last", str(int(self._read("progress")) + 100))
        self._thread.join(DEADLINE_SECONDS)
        if self._error is not None:
            raise self._error
        return self._results

    def _read(self, name: str) -> str:
        end, path = time.monotonic() + 120, self._folder / name
        while time.monotonic() < end and self._error is None:
            if path.exists():
                return path.read_text()
            time.sleep(0.02)
        raise AssertionError(f"the job does not get on: {self._error}")


def _told_apart(ports: Iterable[Port]) -> Iterator[Port]:
    """A worker that is in several groups has a port in each."""
    seen = Counter[str]()
    for port in ports:
        seen[port.name] += 1
        again = f".{seen[port.name]}" if seen[port.name] > 1 else ""
        yield replace(port, name=port.name + again)


def _recognized(owner: str, address: strangers.Address, key: JobKey) -> Iterator[Port]:
    """What listens there, told by how it begins; with what a member would have said to it. Nothing
    where it is not ours: MPI's listens too, and does not speak first."""
    if not strangers.answers(address):
        yield Port(f"gloo{owner[-1]}", address, "shut")
        return
    with strangers.call(address) as line:
        try:
            first = line.recv(64)
        except TimeoutError:
            return
    name = "store" if owner == "worker0" and isinstance(address, tuple) else owner
    hello = Initiator(key, "worker1", name, encrypted=name == "store").answer(first[4:])
    assert hello is not None, "it begins as every port of ours does"
    yield Port(name, address, "hello", (struct.pack("<I", len(hello)) + hello,))


if __name__ == "__main__":
    be_worker(Path(sys.argv[1]))
