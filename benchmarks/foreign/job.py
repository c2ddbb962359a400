"""A training job that knows nothing of Paceline, with one planted cause: a foreign job.

Kinds: ddp, accumulate (DDP with no_sync), fsdp2, plain (dist.all_reduce of every gradient), single
(no process group). Causes are named in `plant`; DEFAULT is an innocent run.
"""

import argparse
import contextlib
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="ddp")
    parser.add_argument("--plant", default="")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.06, help="size of the planted delay")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--norm", action="store_true", help="batch norm: DDP broadcasts buffers")
    parser.add_argument("--groups", action="store_true", help="a second process group")
    parser.add_argument("--step-ms", type=float, default=0.0, help="sleep in forward, for a step")
    return parser.parse_args()


class Samples(Dataset):
    """Random samples whose class is the sign of their first feature."""

    def __init__(self, count: int, width: int, seed: int, delay: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, width, generator=generator)
        self.y = (self.x[:, 0] > 0).long()
        self.delay = delay

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.delay:
            time.sleep(self.delay)
        return self.x[index], self.y[index]


class Sleeping(torch.autograd.Function):
    """Identity that sleeps in backward."""

    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """A layer that takes its time in forward and in backward without using a core."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_seconds = self.backward_seconds = 0.0

    def forward(self, x):
        if self.forward_seconds:
            time.sleep(self.forward_seconds)
        return Sleeping.apply(x, self.backward_seconds) if self.backward_seconds else x


def network(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(args.layers):
        layers.append(nn.Linear(args.width, args.width))
        layers += [] if number else [Slow()]
        layers.append(nn.BatchNorm1d(args.width) if args.norm else nn.Identity())
        layers.append(nn.ReLU())
    layers.append(nn.Linear(args.width, 2))
    return nn.Sequential(*layers)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    ranks, rank = 1, 0
    if args.kind != "single":
        dist.init_process_group("gloo")
        ranks, rank = dist.get_world_size(), dist.get_rank()
    plant, culprit = args.plant, rank == ranks - 1
    raw = network(args)
    slow = next(layer for layer in raw if isinstance(layer, Slow))
    slow.forward_seconds = args.step_ms / 3e3
    slow.backward_seconds = 2 * args.step_ms / 3e3
    if plant == "late-forward" and culprit:
        slow.forward_seconds += args.seconds
    if plant == "late-backward" and culprit:
        slow.backward_seconds += args.seconds
    model: nn.Module = raw
    if args.kind in ("ddp", "accumulate"):
        options = {}
        if plant == "small-buckets":
            options["bucket_cap_mb"] = 0.01
        if plant == "one-bucket":
            options["bucket_cap_mb"] = 1000
        if plant == "unused":
            options["find_unused_parameters"] = True
        model = nn.parallel.DistributedDataParallel(raw, **options)
    elif args.kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in raw:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(raw, mesh=mesh)
    if args.compile:
        model = torch.compile(model, backend="aot_eager")
    rate = {"diverge": 1e4, "still": 0.0, "nan": 0.05}.get(plant, 0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    delay = 0.0
    if plant == "input" or (plant == "late-input" and culprit):
        delay = args.seconds / args.batch
    batch = args.batch
    if plant == "uneven" and culprit:
        batch *= 4
    count = batch * (args.steps + 2)
    loader = DataLoader(Samples(count, args.width, rank, delay), batch)
    other = dist.new_group(list(range(ranks))) if args.groups else None
    if plant == "others-load":
        begin_load()
    for step, (x, y) in enumerate(loader):
        if step == args.steps:
            break
        train_step(args, model, raw, optimizer, x, y, step, ranks, culprit)
        if other is not None:
            dist.broadcast(torch.ones(4), 0, group=other)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in raw.parameters()]
    flat = torch.cat([w.detach().flatten() for w in weights])
    print(f"WEIGHTS {rank} {hash(flat.numpy().tobytes())}", flush=True)
    if args.kind != "single":
        dist.destroy_process_group()
    if plant == "status":
        sys.exit(7)


def train_step(args, model, raw, optimizer, x, y, step, ranks, culprit) -> None:
    plant = args.plant
    if plant in ("hang", "hang-order") and culprit and step == args.steps // 2:
        if plant == "hang":
            time.sleep(3600)
        dist.broadcast(torch.zeros(3), 0)
    if plant == "raise" and culprit and step == args.steps // 2:
        raise ValueError("a bad batch")
    if plant == "checkpoint" and step % 10 == 9 and not culprit:
        torch.save(Saved(10 * args.seconds), os.devnull)
    if plant == "evaluate" and step % 10 == 9 and culprit:
        evaluate(raw, x, 10 * args.seconds)
    if plant == "late-pause" and culprit:
        time.sleep(args.seconds)
    if plant == "pause":
        time.sleep(args.seconds)
    if plant == "nan" and step > args.steps // 2:
        x = x * float("nan")
    optimizer.zero_grad()
    parts = 4 if args.kind == "accumulate" else 1
    for number, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        syncs = number == parts - 1 or parts == 1
        with contextlib.nullcontext() if syncs else model.no_sync():
            loss = nn.functional.cross_entropy(model(xs), ys) / parts
            loss.backward()
    if args.kind == "plain":
        for parameter in raw.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
    optimizer.step()


class Saved:
    """Takes its time to be written."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getstate__(self) -> dict:
        time.sleep(self.seconds)
        return {}


def evaluate(model: nn.Module, x: torch.Tensor, seconds: float) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
        time.sleep(seconds)
    model.train()


def begin_load() -> None:
    """Other processes' work on every core, for as long as this job runs."""
    if dist.is_initialized() and dist.get_rank():
        return
    import subprocess

    for _ in range(2 * (os.cpu_count() or 1)):
        burn = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        threading.Thread(target=lambda: None).start()
        import atexit

        atexit.register(burn.kill)


if __name__ == "__main__":
    main()
