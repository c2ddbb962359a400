"""Peer `ddp`: a plain PyTorch script with DistributedDataParallel over gloo.

As fast as its users can make it: channels last where that helps, gradients that live in the
buckets, an own slice of the cores.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from paceline import models
from paceline.bench.peers import job
from paceline.bench.peers.job import Array, PeerMember
from paceline.errors import SpecError
from paceline.telemetry import StepClock

JOIN_SECONDS = 120.0


def main() -> None:
    with job.member() as member:
        torch.set_num_threads(member.job.threads)
        join(member)
        model = DistributedDataParallel(build(member), gradient_as_bucket_view=True)
        optimizer = sgd(member, model)
        train(member, model, optimizer)
        # All leave together, and by ending: freeing a gloo group may hang on its own threads.
        dist.barrier()


def join(member: PeerMember) -> None:
    """Meet the other workers at worker 0's address."""
    address, _, port = member.job.addresses[0].rpartition(":")
    identity, patience = member.identity, timedelta(seconds=JOIN_SECONDS)
    store = TCPStore(address, int(port), is_master=identity.rank == 0, timeout=patience)
    dist.init_process_group(
        "gloo", store=store, rank=identity.rank, world_size=identity.workers, timeout=patience
    )


def build(member: PeerMember) -> torch.nn.Module:
    """The model with the first weights that everybody starts from."""
    asked = member.job
    model = models.build(asked.model, input_shape=asked.input_shape, num_classes=asked.num_classes)
    weights = {name: torch.from_numpy(array) for name, array in member.weights().items()}
    model.load_state_dict(weights, strict=False)
    return model.to(memory_format=_layout(member))  # type: ignore[call-overload, no-any-return]


def sgd(member: PeerMember, model: torch.nn.Module) -> torch.optim.Optimizer:
    options = member.job.optimizer
    if options.name != "sgd":
        problem = f'this peer has no optimizer "{options.name}".'
        raise SpecError("peer", problem, "compare with sgd.")
    return torch.optim.SGD(
        model.parameters(),
        lr=options.learning_rate,
        momentum=options.momentum,
        nesterov=options.nesterov,
        weight_decay=options.weight_decay,
    )


def train(member: PeerMember, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The loop of any PyTorch tutorial, timed by phase.

    The exchange hides inside backward, where a script cannot tell how much of it was waited for.
    """
    clock, pending = StepClock(), None
    for step in range(member.job.steps):
        clock.enter("input")
        inputs, targets = tensors(*member.batch(step))
        clock.enter("forward")
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        clock.enter("backward")
        loss.backward()
        clock.enter("update")
        optimizer.step()
        member.add(pending)
        pending = clock.end_step(step, len(targets)), loss.detach()
    member.add(pending)


def tensors(inputs: Array, targets: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures arrive with channels last in memory, and stay so."""
    samples = torch.from_numpy(inputs)
    return samples.permute(0, 3, 1, 2) if samples.ndim == 4 else samples, torch.from_numpy(targets)


def _layout(member: PeerMember) -> Any:
    entry = models.info(member.job.model)
    last = entry is not None and entry.channels_last
    return torch.channels_last if last else torch.contiguous_format


if __name__ == "__main__":
    job.run(main)
