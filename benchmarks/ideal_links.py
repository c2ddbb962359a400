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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import tunnel
from tunnel import COMPUTE_SECONDS, PAYLOAD_BYTES_PER_SECOND, WORKERS, profile_of

from paceline import spec
from paceline.predict.clock import Clock
from paceline.predict.device import Device, LayerTime
from paceline.predict.links import Links
from paceline.predict.virtual import Path, VirtualJob
from paceline.protocol import ParameterSize
from paceline.protocol.actions import Send, Work
from paceline.protocol.placement import Placement, exchange_seconds
from paceline.protocol.plan import Plan, Shape, make_plan
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
    chance = random.Random(0)

    def stretch(worker: int, layer: int, seconds: float) -> float:
        return seconds + chance.uniform(0, jitter) * (chance.random() < 0.05)

    return run(plan, layers, STEPS, PAYLOAD_BYTES_PER_SECOND, stretch)


def as_profiled(worker: int, layer: int, seconds: float) -> float:
    return seconds


def run(
    plan: Plan,
    layers: Sequence[Layer],
    steps: int,
    bytes_per_second: float,
    stretch: Callable[[int, int, float], float] = as_profiled,
    *,
    clips: bool = False,
    **costs: float,
) -> VirtualJob:
    """Every worker has a device with these layers, one for each parameter of the plan, takes so
    many steps and leaves. `stretch`: jitter, stragglers. `clips`: by the norm of all."""
    clock = Clock()
    job = VirtualJob(plan, Ideal(plan=plan, **costs), star(clock, plan, bytes_per_second), clock)
    times = [LayerTime(layer.forward_seconds, layer.backward_seconds) for layer in layers]
    for world in job.members.values():
        if world.machine is not None:
            device = world.device = Device(plan, world.member, clock, times)
            device.clips = clips
            device.stretch, device.steps = partial(stretch, world.machine.worker), steps
            device.go_on()
    clock.run()
    return job


def step_ends(job: VirtualJob) -> list[list[float]]:
    """For each worker, when the backward pass of each step had ended."""
    devices = [world.device for world in job.members.values()]
    return [device.step_ends for device in devices if device is not None]


def step_seconds(job: VirtualJob) -> float:
    """The median after warm-up, each step to its slowest worker."""
    ends = [max(moments) for moments in zip(*step_ends(job), strict=True)][WARMUP_STEPS - 1 :]
    return statistics.median(b - a for a, b in pairwise(ends))


@dataclass(frozen=True, kw_only=True)
class Ideal:
    """Costs that are the same for all; none unless given."""

    plan: Plan
    sum_seconds_per_byte: float = 0.0
    """Of each gradient that a server sums."""

    update_seconds_per_byte: float = 0.0
    """Of a chunk that is updated."""

    message_seconds: float = 0.0
    """Of each packet, at the member that takes it in."""

    def payload_bytes(self, send: Send) -> float:
        assert send.payload is not None
        return float(self.plan.layout.chunks[send.payload].size_bytes)

    def sending_seconds(self, send: Send) -> float:
        return 0.0

    def receiving_seconds(self, member: str, sends: Sequence[Send]) -> float:
        return self.message_seconds

    def working_seconds(self, member: str, work: Work) -> float:
        size_bytes = self.plan.layout.chunks[work.chunk].size_bytes
        sums = 0 if work.kind == "apply" else len(work.parts)
        updates = work.kind in ("update", "apply") and bool(work.parts)
        seconds = sums * size_bytes * self.sum_seconds_per_byte
        return seconds + updates * size_bytes * self.update_seconds_per_byte


class Star:
    """Every member has a cable of its own to one switch that is never full."""

    def __init__(self, links: Links) -> None:
        self.links = links

    def path(self, source: str, target: str, *, to_seat: bool) -> Path:
        return (f"{source} out", f"{target} in")


def star(clock: Clock, plan: Plan, bytes_per_second: float) -> Star:
    links = Links(clock)
    names = {f"worker{w}" for w in range(plan.workers)} | {seat.member for seat in plan.seats}
    for name in sorted(names):
        links.add(f"{name} out", bytes_per_second)
        links.add(f"{name} in", bytes_per_second)
    return Star(links)


if __name__ == "__main__":
    main()
