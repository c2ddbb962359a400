"""One worker is killed under torchrun, torchft and Horovod elastic: how long until steps go on?

Started by `recovery.py`; each peer's workers are this file again, in that peer's interpreter, with
the same small model and a step that takes as long everywhere. Imports no Paceline, and no framework
before it is a worker.
"""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

STEPS, AT_STEP, CHECKPOINT_EVERY, STEP_SECONDS = 60, 33, 10, 0.1
DEADLINE_SECONDS = 100.0
BACK_STEPS = 3


def measure(name: str, python: str, folder: Path) -> dict[str, Any]:
    """Kill worker 1 of two at a step; what the surviving or restarted worker 0 recorded."""
    folder.mkdir()
    imports = {"ddp": "torch", "torchft": "torchft", "horovod": "horovod.torch"}[name]
    tried = subprocess.run([python, "-c", f"import {imports}"], capture_output=True, text=True)
    if tried.returncode:
        return {"cannot": (tried.stderr.splitlines() or ["?"])[-1]}
    log = (folder / "log").open("w")
    started = [
        subprocess.Popen(
            line, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        for line, environment in PEERS[name](python, folder)
    ]
    try:
        killed_at = _kill(folder)
        _wait(folder, started)
    except TimeoutError as error:
        return {"failed": f"{error}; {(folder / 'log').read_text()[-300:]}"}
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()
    return _times(folder, killed_at)


def _steps(folder: Path, worker: int) -> list[dict[str, Any]]:
    path = folder / f"worker{worker}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _kill(folder: Path) -> float:
    """Returns when."""
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        steps = _steps(folder, 1)
        if steps and steps[-1]["step"] >= AT_STEP:
            os.kill(steps[-1]["pid"], signal.SIGKILL)
            return time.monotonic()
        time.sleep(0.02)
    raise TimeoutError("worker 1 never came to the step at which it was to be killed")


def _wait(folder: Path, started: "list[subprocess.Popen[bytes]]") -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        steps = _steps(folder, 0)
        if steps and steps[-1]["step"] == STEPS - 1:
            return
        time.sleep(0.1)
    raise TimeoutError("worker 0 never came to the last step after the kill")


def _times(folder: Path, killed_at: float) -> dict[str, Any]:
    steps = _steps(folder, 0)
    before = [step for step in steps if step["end"] < killed_at]
    after = [step for step in steps if step["end"] >= killed_at]
    usual = median(b["end"] - a["end"] for a, b in pairwise(before[2:]))
    last = max(step["step"] for step in before)
    return {
        "step_seconds": usual,
        "back_seconds": _back([step["end"] for step in after], killed_at, usual),
        "undone_steps": sum(step["step"] <= last for step in after),
        "last_loss": after[-1]["loss"],
    }


def _back(ends: list[float], killed_at: float, usual: float) -> float | None:
    """Until the first of three steps in a row that take as long as before."""
    for at in range(len(ends) - BACK_STEPS):
        between = [b - a for a, b in pairwise(ends[at : at + BACK_STEPS + 1])]
        if all(seconds <= 1.5 * usual for seconds in between):
            return ends[at] - killed_at
    return None


Start = tuple[list[str], dict[str, str]]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def torchrun(python: str, folder: Path) -> Iterator[Start]:
    line = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    line += ["--max-restarts", "3", __file__, "ddp", str(folder)]
    yield line, _environment()


def torchft(python: str, folder: Path) -> Iterator[Start]:
    """Two replica groups of one worker each, which meet at a lighthouse."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lighthouse = str(Path(python).with_name("torchft_lighthouse"))
    options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "3000"]
    bind = ["--bind", f"127.0.0.1:{port}"]
    yield [lighthouse, *options, *bind], _environment()
    for number in range(2):
        told = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "REPLICA": str(number)}
        yield [python, __file__, "torchft", str(folder)], _environment(**told)


def horovod(python: str, folder: Path) -> Iterator[Start]:
    """A host that fails is never used again, so each worker is given a host of its own."""
    discover = folder / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    discover.chmod(discover.stat().st_mode | stat.S_IXUSR)
    line = [str(Path(python).with_name("horovodrun")), "-np", "2", "--min-np", "1", "--gloo"]
    line += ["--host-discovery-script", str(discover)]
    yield [*line, python, __file__, "horovod", str(folder)], _environment()


PEERS: dict[str, Callable[[str, Path], Iterator[Start]]] = {
    "ddp": torchrun,
    "torchft": torchft,
    "horovod": horovod,
}


# The workers.


class Training:
    """The same model, data and record everywhere."""

    def __init__(self, folder: Path) -> None:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(784, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.folder, self._torch = folder, torch
        self._mean, self._spread = torch.randn(10, 784), 12.0

    def loss(self, model: Any, step: int, worker: int) -> Any:
        torch = self._torch
        random = torch.Generator().manual_seed(1000 * step + worker)
        targets = torch.randint(0, 10, (32,), generator=random)
        inputs = self._mean[targets] + self._spread * torch.randn(32, 784, generator=random)
        time.sleep(STEP_SECONDS)
        return torch.nn.functional.cross_entropy(model(inputs), targets)

    def note(self, worker: int, step: int, loss: Any) -> None:
        told = {"step": step, "end": time.monotonic(), "loss": float(loss), "pid": os.getpid()}
        with (self.folder / f"worker{worker}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")


def be_ddp(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, training = dist.get_rank(), Training(folder)
    checkpoint, first = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    model = torch.nn.parallel.DistributedDataParallel(training.model)
    for step in range(first, STEPS):
        training.optimizer.zero_grad()
        loss = training.loss(model, step, rank)
        loss.backward()
        training.optimizer.step()
        training.note(rank, step, loss.detach())
        if (step + 1) % CHECKPOINT_EVERY == 0 and rank == 0:
            saved = {"step": step + 1, "model": training.model.state_dict()}
            saved["optimizer"] = training.optimizer.state_dict()
            torch.save(saved, folder / "partial.pt")
            (folder / "partial.pt").replace(checkpoint)
    dist.destroy_process_group()


def be_torchft(folder: Path) -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    number, training = int(os.environ["REPLICA"]), Training(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda saved: training.model.load_state_dict(saved["model"]),
        state_dict=lambda: {"model": training.model.state_dict()},
        min_replica_size=1,
        replica_id=f"worker{number}",
        store_addr="127.0.0.1",
        hostname="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=5),
    )
    model = DistributedDataParallel(manager, training.model)
    optimizer = Optimizer(manager, training.optimizer)
    while manager.current_step() < STEPS:
        step = manager.current_step()
        optimizer.zero_grad()
        loss = training.loss(model, step, number)
        loss.backward()
        optimizer.step()
        training.note(number, step, loss.detach())
    manager.shutdown()


def be_horovod(folder: Path) -> None:
    import horovod.torch as hvd

    hvd.init()
    training = Training(folder)
    names = training.model.named_parameters()
    optimizer = hvd.DistributedOptimizer(training.optimizer, named_parameters=names)

    @hvd.elastic.run  # type: ignore[misc]
    def train(state: Any) -> None:
        while state.step < STEPS:
            optimizer.zero_grad()
            loss = training.loss(training.model, state.step, hvd.rank())
            loss.backward()
            optimizer.step()
            training.note(hvd.rank(), state.step, loss.detach())
            state.step += 1
            state.commit()

    train(hvd.elastic.TorchState(training.model, optimizer, step=0))


WORKERS = {"ddp": be_ddp, "torchft": be_torchft, "horovod": be_horovod}

if __name__ == "__main__":
    WORKERS[sys.argv[1]](Path(sys.argv[2]))
