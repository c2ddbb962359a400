"""Gradients in buckets: averaged once backward is over, whatever the model does with its layers."""

import threading

import pytest
import torch
from torch import nn

from paceline.autograd.averaging import BucketedArchitecture
from paceline.autograd.trained import Trained
from paceline.errors import SpecError
from tests.support.threads import run_threads

WORKERS = 2
SEEDING = threading.Lock()  # torch has one generator for all threads


class Model(nn.Module):
    """A picture model with tied, frozen and sometimes unused layers."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(4, 4)
        self.tied_again = self.tied
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.for_rank_0 = nn.Linear(4, 4)

    def forward(self, pictures, rank):
        values = self.convolution(pictures).mean(dim=(2, 3))
        values = self.frozen(self.tied_again(self.tied(values)))
        return self.for_rank_0(values) if rank == 0 else values


def build():
    with SEEDING:
        torch.manual_seed(2)
        return Model()


def pictures(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 3, 8, 8, generator=generator)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def backward_once(collective, context):
    rank, model = context.identity.rank, build()
    architecture = BucketedArchitecture(collective, context, bucket_bytes=100)
    architecture.distribute(Trained(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    model(pictures(rank), rank).square().sum().backward()
    return gradients(model)


def expected():
    """Each worker's gradients on its own, averaged; one who has none counts as zero."""
    found = []
    for rank in range(WORKERS):
        model = build()
        model(pictures(rank), rank).square().sum().backward()
        found.append(gradients(model))
    mean = {}
    for name in found[0]:
        own = [one[name] for one in found if one[name] is not None]
        mean[name] = sum(own) / WORKERS if own else None
    return mean


def test_every_gradient_is_the_mean_and_unused_ones_stay_none():
    wanted = expected()
    assert wanted["unused.weight"] is None
    assert wanted["for_rank_0.weight"] is not None
    for found in run_threads(backward_once, WORKERS):
        for name, gradient in wanted.items():
            if gradient is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(found[name], gradient)


def accumulate(collective, context):
    rank, model = context.identity.rank, build()
    architecture = BucketedArchitecture(collective, context, bucket_bytes=1 << 20)
    architecture.distribute(Trained(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    with architecture.no_sync():
        model(pictures(rank), rank).square().sum().backward()
    inside = model.tied.weight.grad.clone()
    model(pictures(rank), rank).square().sum().backward()
    architecture.clip(1e-3)
    return inside, gradients(model)


def test_accumulated_gradients_are_exchanged_once_and_clipped_as_a_whole():
    wanted = expected()
    (first_inside, first), (second_inside, second) = run_threads(accumulate, WORKERS)
    assert not torch.equal(first_inside, second_inside), "exchanged inside no_sync"
    for name in wanted:
        if first[name] is not None:
            torch.testing.assert_close(first[name], second[name])
    squares = [2 * g for g in wanted.values() if g is not None]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in squares]))
    clipped = 2 * wanted["tied.weight"] * (1e-3 / norm)
    torch.testing.assert_close(first["tied.weight"], clipped, rtol=1e-3, atol=1e-9)


def backward_sparse(collective, context):
    model = nn.Embedding(4, 2, sparse=True)
    architecture = BucketedArchitecture(collective, context, bucket_bytes=100)
    architecture.distribute(Trained(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    model(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused_with_the_fix():
    with pytest.raises(SpecError, match="sparse=False"):
        run_threads(backward_sparse, WORKERS)
