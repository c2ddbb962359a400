"""Exchange of gradients on one host: gloo, MPI, our servers, `hybrid`, and a plain copy of it.

    python benchmarks/exchange.py --json

Every worker is one process that takes part in all of them, one after the other in each round, so
that noise hits all alike. `server-shm` starts with the gradients in the shared segment, where the
backward hook puts them, and ends with the mean where all can read it; `server-shm-copied` includes
putting them there. `hybrid` starts there too, and ends with the sum in every worker's own memory,
as gloo and MPI do. `server-tcp` goes through loopback sockets, from and to one's own memory.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline import spec
from paceline.architectures.hybrid.host_sums import HostCollective
from paceline.collectives.context import Context
from paceline.collectives.notes import Meeting
from paceline.compute.freed_memory import keep_freed_memory
from paceline.launch import Identity
from paceline.launch.local import share_cores
from paceline.protocol.actions import Ready
from paceline.protocol.buckets import HYBRID_BUCKET_BYTES
from paceline.served import setup
from paceline.served.memory import Piece
from paceline.served.shapes import Exchanged
from paceline.telemetry import StepClock

EXCHANGES = ("memcpy", "gloo", "server-shm", "server-shm-copied", "hybrid", "server-tcp", "mpi")
SIZES_MB = (1, 16, 100, 528)
WORKERS = (2, 4)
ROUNDS = 3
SECONDS_PER_MEASUREMENT = 0.2
TARGETS = (
    ("gloo", "server-shm", 100, 4.0),
    ("mpi", "server-shm", 100, 1.5),
    ("mpi", "server-shm", 1, 1.0),
    ("mpi", "hybrid", 1, 1.0),
    ("gloo", "server-tcp", 100, 1.1),
)
"""Peer, ours, MB, and how many times as fast we want to be."""
Exchange = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MB, metavar="MB")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=EXCHANGES, default=EXCHANGES)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        be_member(json.loads(given.member), given)
        return
    rows = [row for n in given.workers for row in run_workers(n, given)]
    result = {"rows": rows, "checks": checks(rows)}
    print(json.dumps(result) if given.json else table(result))


def run_workers(workers: int, given: argparse.Namespace) -> list[dict[str, object]]:
    """Start one job of `workers` processes; returns the rows its worker 0 measured."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = [sys.executable, __file__, "--rounds", str(given.rounds), "--only", *given.only]
    script += ["--sizes", *map(str, given.sizes)]
    mpirun = Path(sys.executable).with_name("mpirun")
    launcher = str(mpirun) if mpirun.exists() else shutil.which("mpirun")

    def member(rank: int, mpi: bool) -> list[str]:
        facts = {"rank": rank, "workers": workers, "port": port, "mpi": mpi}
        return [*script, "--member", json.dumps(facts)]

    if launcher and has_mpi():
        command = [launcher, "--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
        for rank in range(workers):
            command += [*([":"] if rank else []), "-n", "1", *member(rank, mpi=True)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True)]
    else:
        processes = [
            subprocess.Popen(member(rank, mpi=False), stdout=subprocess.PIPE, text=True)
            for rank in range(workers)
        ]
    try:
        output = processes[0].communicate(timeout=900)[0]
        if any(process.wait(timeout=60) for process in processes):
            raise SystemExit(f"a worker failed; see above.\n{output}")
    finally:
        for process in processes:
            process.kill()
    rows: list[dict[str, object]] = json.loads(output.splitlines()[-1])
    return rows


def has_mpi() -> bool:
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return False
    return True


def be_member(facts: dict[str, int], given: argparse.Namespace) -> None:
    """One worker: every exchange at every size, rounds alternating; worker 0 prints the rows."""
    rank, workers = facts["rank"], facts["workers"]
    # As in every process that trains: cores of its own, one thread, freed memory kept.
    cores = share_cores(workers)[rank]
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    keep_freed_memory()
    store = dist.TCPStore(
        "127.0.0.1", facts["port"], is_master=rank == 0, timeout=timedelta(seconds=120)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    rows: list[dict[str, object]] = []
    for size_mb in given.sizes:
        source, target = torch.ones(elements(size_mb)), torch.zeros(elements(size_mb))
        shared = join(size_mb, "shm", facts, store, target)
        travelling = join(size_mb, "tcp", facts, store, target)
        exchanges: dict[str, Exchange] = {
            "memcpy": lambda s=source, t=target: t.copy_(s),  # type: ignore[misc]
            "gloo": gloo(target, workers),
            "server-shm": server(shared, source, from_source=False),
            "server-shm-copied": server(shared, source, from_source=True),
            "server-tcp": server(travelling, source, from_source=True),
        }
        sums, exchanges["hybrid"] = hybrid(size_mb, facts, store)
        if facts["mpi"]:
            exchanges["mpi"] = mpi(source, target, workers)
        exchanges = {name: found for name, found in exchanges.items() if name in given.only}
        seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in exchanges}
        for _ in range(given.rounds):
            for name, exchange in exchanges.items():
                dist.barrier()
                seconds[name].append(measure(exchange))
        for name, values in seconds.items():
            wall, cpu, kernel = map(list, zip(*values, strict=True))
            row = {"exchange": name, "workers": workers, "size_mb": size_mb}
            row |= {"seconds": statistics.median(wall), "all_seconds": wall}
            row |= {"cpu_seconds": statistics.median(cpu)}
            rows.append({**row, "kernel_seconds": statistics.median(kernel)})
        dist.barrier()
        for member in (shared, travelling):
            member.close(30.0)
        sums.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(rows))


def measure(exchange: Exchange) -> tuple[float, float, float]:
    """Wall seconds of one exchange; CPU seconds of all workers (MPI waits by spinning), and those
    of them in the kernel: over sockets, two copies of each byte that nobody can save.

    Each exchange is a barrier in itself, so several follow directly.
    """
    exchange()
    began = time.perf_counter()
    exchange()
    trial = torch.tensor(time.perf_counter() - began)
    dist.broadcast(trial, 0)  # everyone must count alike
    count = max(2, min(50, round(SECONDS_PER_MEASUREMENT / float(trial))))
    dist.barrier()
    began, before = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        exchange()
    wall = (time.perf_counter() - began) / count
    used = (cpu_seconds() - before) / count
    dist.all_reduce(used)
    cpu, kernel = used.tolist()
    return wall, cpu, kernel


def cpu_seconds() -> torch.Tensor:
    """Of this process: in all, and in the kernel."""
    in_kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    return torch.tensor([time.process_time(), in_kernel], dtype=torch.float64)


def elements(size_mb: int) -> int:
    return size_mb * 1_000_000 // 4


def gloo(values: torch.Tensor, workers: int) -> Exchange:
    values.fill_(1.0)
    dist.all_reduce(values)
    assert values.eq(workers).all(), "gloo did not sum"
    values.zero_()
    return lambda: dist.all_reduce(values)


def mpi(source: torch.Tensor, target: torch.Tensor, workers: int) -> Exchange:
    from mpi4py import MPI

    give, take = source.numpy(), target.numpy()
    MPI.COMM_WORLD.Allreduce(give, take)
    assert target.eq(workers).all(), "MPI did not sum"
    return lambda: MPI.COMM_WORLD.Allreduce(give, take)


def context(name: str, facts: dict[str, int], store: dist.Store) -> Context:
    """What an architecture of this worker may use, in an exchange of its own."""
    rank, workers = facts["rank"], facts["workers"]
    identity = Identity(
        index=rank, workers=workers, local_index=rank, local_members=workers, key="benchmark"
    )
    return Context(
        identity=identity,
        store=dist.PrefixStore(name, store),
        clock=StepClock(),
        device=torch.device("cpu"),
        note=lambda text: None,
    )


def hybrid(
    size_mb: int, facts: dict[str, int], store: dist.Store
) -> tuple[HostCollective, Exchange]:
    """Buckets as `hybrid` deals them, all of them full at once."""
    own = context(f"{size_mb}/hybrid", facts, store)
    sums = HostCollective(own, Meeting(own), [range(facts["workers"])], lambda: None)
    most = HYBRID_BUCKET_BYTES // 4
    counts = [min(most, elements(size_mb) - at) for at in range(0, elements(size_mb), most)]
    buckets = [sums.allocate_bucket(count, torch.float32, own.device) for count in counts]
    sums.connect()

    def exchange() -> None:
        for bucket in buckets:
            sums.start(bucket)
        sums.finish()

    for bucket in buckets:
        bucket.fill_(1.0)
    exchange()
    assert all(bucket.eq(facts["workers"]).all() for bucket in buckets), "hybrid did not sum"
    for bucket in buckets:
        bucket.zero_()  # each exchange begins with the sums of the one before
    return sums, exchange


def join(
    size_mb: int, transport: str, facts: dict[str, int], store: dist.Store, target: torch.Tensor
) -> setup.OpenWorker:
    """Become a worker with a colocated server that only sums: an all-reduce by code that trains."""
    options = spec.parse_architecture(
        f"server:placement=colocated,update=worker,transport={transport}"
    )
    assert isinstance(options, spec.Server)
    exchanged = Exchanged(
        names=["gradient"], tensors=[target], groups=[0], optimizer="", settings=[]
    )
    own = context(f"{size_mb}/{transport}", facts, store)
    return setup.set_up_worker(options, own, exchanged)


def server(member: setup.OpenWorker, source: torch.Tensor, *, from_source: bool) -> Exchange:
    """Push all chunks, and wait for all means."""
    ready = prepared(member, source, from_source)

    def exchange() -> None:
        member.worker.submit(ready)
        member.worker.wait_all()

    for chunk in range(len(member.plan.owners)):
        member.held.chunk(chunk).zero_()
    dist.barrier()
    exchange()
    mean = member.held.parameter(0, source)
    assert torch.allclose(mean, source), "the servers did not average"
    dist.barrier()  # in shared memory the next to come would zero what others still look at
    return exchange


def prepared(
    member: setup.OpenWorker, source: torch.Tensor, from_source: bool
) -> list[tuple[Ready, list[Piece]]]:
    """All chunks as ready gradients: views of `source`, or what is in the segment already."""
    ready: list[tuple[Ready, list[Piece]]] = []
    for chunk in member.plan.layout.chunks:
        end = min(chunk.stop, source.numel())
        values = source[chunk.start : end]
        local = member.plan.seats[member.plan.owners[chunk.index]].member == member.mailbox.name
        if not from_source and not local:
            assert member.gradients is not None
            member.gradients.chunk(chunk.index)[: end - chunk.start].copy_(values)
            ready.append((Ready(chunk.index, mean=True), []))
        else:
            ready.append((Ready(chunk.index, mean=True), [(0, end - chunk.start, values)]))
    return ready


def checks(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """What is aimed at, as far as these rows cover it."""
    seconds = {(r["exchange"], r["workers"], r["size_mb"]): float(r["seconds"]) for r in rows}  # type: ignore[arg-type]
    found = []
    for peer, ours, size_mb, target in TARGETS:
        for workers in sorted({workers for _, workers, _ in seconds}):  # type: ignore[type-var]
            pair = (peer, workers, size_mb), (ours, workers, size_mb)
            if all(key in seconds for key in pair):
                value = seconds[pair[0]] / seconds[pair[1]]
                name = f"{ours} against {peer}, {size_mb} MB, {workers} workers"
                found.append(
                    {"name": name, "value": value, "target": target, "holds": value >= target}
                )
    return found


def table(result: dict[str, list[dict[str, object]]]) -> str:
    lines = [
        f"{row['workers']} workers  {row['size_mb']:>4} MB  {row['exchange']:<18}"
        f"{1e3 * float(row['seconds']):9.2f} ms  cpu {1e3 * float(row['cpu_seconds']):9.2f} ms"  # type: ignore[arg-type]
        f"  in the kernel {1e3 * float(row['kernel_seconds']):9.2f} ms"  # type: ignore[arg-type]
        for row in result["rows"]
    ]
    lines += [
        f"{'holds' if check['holds'] else 'FAILS'}  {check['name']}: "
        f"{check['value']:.2f} (target {check['target']})"
        for check in result["checks"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
