"""What ideal links allow: the protocol's own machines, and links that cost nothing but bytes.

    python benchmarks/ideal_links.py --json

The limit in `tunnel.py` takes every link as full at all times. Two things keep it from that on any
hardware: a layer waits for its own weights, and connections that share a link get parts of it by
what each has queued, up to a window, however much it still has to carry. Here both hold and nothing
else costs anything: no CPU, no latency. What a run in the tunnel takes beyond this is ours or this
machine's.
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import tunnel
from tunnel import COMPUTE_SECONDS, PAYLOAD_BYTES_PER_SECOND, WORKERS, profile_of

from paceline import spec
from paceline.predict.clock import Clock
from paceline.predict.virtual import Ideal, VirtualJob, star
from paceline.protocol import ParameterSize
from paceline.protocol.placement import Placement, exchange_seconds
from paceline.protocol.plan import Shape, make_plan
from paceline.spec.profile import Layer

ROWS: dict[str, tuple[Placement, int]] = {
    name: (architecture.placement, servers)
    for name, (text, servers) in tunnel.ROWS.items()
    if isinstance(architecture := spec.parse_architecture(text), spec.Server)
}
"""Those of `tunnel.py` that have servers."""

STEPS, WARMUP_STEPS = 8, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compute", type=float, nargs="+", default=COMPUTE_SECONDS)
    parser.add_argument("--window", type=int, default=spec.Server().window)
    parser.add_argument(
        "--jitter", type=float, default=0.0, metavar="SECONDS", help="at most, in a layer of twenty"
    )
    given = parser.parse_args()
    rows = [
        row(name, compute, given.window, given.jitter) for name in ROWS for compute in given.compute
    ]
    if given.json:
        print(json.dumps({"rows": rows, "checks": []}, indent=1))
        return
    for found in rows:
        name, compute, seconds = found["name"], found["compute_seconds"], found["seconds"]
        ratio = seconds / found["limit_seconds"]
        print(f"{name:10} compute {compute:4.2f} s  step {seconds:6.3f} s  x{ratio:5.2f} its limit")


def row(name: str, compute: float, window: int, jitter: float) -> dict[str, Any]:
    placement, servers = ROWS[name]
    job = job_of(placement, servers, profile_of(compute).layers, window, jitter)
    size_bytes = job.plan.layout.size_bytes
    exchange = exchange_seconds(placement, WORKERS, servers, size_bytes, PAYLOAD_BYTES_PER_SECOND)
    return {
        "name": name,
        "compute_seconds": compute,
        "seconds": step_seconds(job),
        "limit_seconds": max(compute, exchange),
    }


def job_of(
    placement: Placement, servers: int, layers: Sequence[Layer], window: int, jitter: float
) -> VirtualJob:
    """A job that has run: a device for each worker, and cables that cost nothing but bytes."""
    sizes = [ParameterSize(name=x.name, elements=x.parameter_bytes // 4) for x in layers]
    options = spec.Server(placement=placement, window=window)
    plan = make_plan(sizes, options, Shape(workers=WORKERS, servers=servers))
    clock, chance = Clock(), random.Random(0)

    def stretch(worker: int, layer: int, seconds: float) -> float:
        return seconds + chance.uniform(0, jitter) * (chance.random() < 0.05)

    roads = star(clock, plan, PAYLOAD_BYTES_PER_SECOND)
    job = VirtualJob(plan, Ideal(plan=plan), roads, clock)
    job.compute(layers, STEPS, stretch)
    return job


def step_seconds(job: VirtualJob) -> float:
    """The median after warm-up, each step to its slowest worker."""
    ends = [max(moments) for moments in zip(*job.step_ends, strict=True)][WARMUP_STEPS - 1 :]
    return statistics.median(b - a for a, b in pairwise(ends))


if __name__ == "__main__":
    main()
