"""`average`: with H = 1 it is `ring`; with more it is what its formula says, done by hand here."""

import copy
import threading

import pytest
import torch
from torch import nn

from paceline import spec
from paceline.architectures.average import AverageArchitecture, Rounds
from paceline.autograd.trained import Trained
from paceline.errors import ExchangeError
from paceline.testing import run_members
from tests.support.curves import largest_difference, loss_curve, whole
from tests.support.threads import run_threads

WORKERS, STEPS, RATE = 3, 12, 0.1
SEEDING = threading.Lock()  # torch has one generator for all threads


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(plain_curve, workers=1))


def plain_curve(session, shares=None):
    return loss_curve(session, shares, momentum=0.0)


def test_every_step_with_plain_sgd_is_ring(reference):
    parts = run_members(plain_curve, workers=2, architecture=spec.Average())
    assert largest_difference(whole(parts), reference) < 1e-4


def test_uneven_shares_give_the_whole_batch_gradient(reference):
    parts = run_members(plain_curve, [3.0, 1.0], workers=2, architecture=spec.Average())
    assert largest_difference(whole(parts), reference) < 1e-4


def curve_without_averaging(session):
    Rounds._agree = lambda self, *, late: None
    return plain_curve(session)


def test_the_comparison_notices_weights_that_are_not_averaged(reference):
    parts = run_members(curve_without_averaging, workers=2, architecture=spec.Average())
    assert largest_difference(whole(parts), reference) > 1e-3


def model_of(rank=0):
    with SEEDING:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # only worker 0's start may count
    return model


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 4, generator=generator)


def local_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    optimizer.step()


def train(collective, context, options, momentum=0.0):
    """One worker's flat weights after each step, its buffers and counters, settled at the end."""
    model = model_of(context.identity.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    architecture = AverageArchitecture(options, context, collective)
    architecture.distribute(Trained(model, [optimizer]))
    path = []
    for step in range(STEPS):
        local_step(model, optimizer, context.identity.rank, step)
        path.append(flat(model))
    architecture.settle()
    return {
        "path": path,
        "settled": flat(model),
        "buffers": model[1].running_var.clone(),
        "momentum": [state.get("momentum_buffer") for state in optimizer.state.values()],
        "counters": architecture.counters(),
    }


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def set_flat(model, values):
    torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


class ByHand:
    """The same workers one after another, and the exchange written out."""

    def __init__(self):
        self.models = [model_of() for _ in range(WORKERS)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in self.models]

    def local_step(self, step):
        for rank in range(WORKERS):
            local_step(self.models[rank], self.optimizers[rank], rank, step)

    def weights(self):
        return [flat(model) for model in self.models]

    def mean(self):
        return torch.stack(self.weights()).mean(dim=0)

    def set_all(self, values):
        for model, own in zip(self.models, values, strict=True):
            set_flat(model, own)


def test_local_steps_then_the_mean():
    found = run_threads(train, WORKERS, spec.Average(every=4))
    hand = ByHand()
    for step in range(STEPS):
        hand.local_step(step)
        if (step + 1) % 4 == 0:
            hand.set_all([hand.mean()] * WORKERS)
        for rank, own in enumerate(hand.weights()):
            torch.testing.assert_close(found[rank]["path"][step], own)


def test_workers_differ_between_rounds_and_agree_when_settled():
    found = run_threads(train, WORKERS, spec.Average(every=5))
    last = [result["path"][-1] for result in found]
    assert not torch.equal(last[0], last[1])
    assert torch.equal(found[0]["settled"], found[1]["settled"])
    torch.testing.assert_close(found[0]["settled"], torch.stack(last).mean(dim=0))


def test_an_outer_optimizer_is_diloco():
    rate, momentum = 0.7, 0.9
    found = run_threads(train, WORKERS, spec.Average(every=3, outer="nesterov"))
    hand = ByHand()
    agreed, velocity = hand.weights()[0], torch.zeros_like(hand.weights()[0])
    for step in range(STEPS):
        hand.local_step(step)
        if (step + 1) % 3 == 0:
            gradient = agreed - hand.mean()
            velocity = momentum * velocity + gradient
            agreed = agreed - rate * (gradient + momentum * velocity)
            hand.set_all([agreed] * WORKERS)
    for result in found:
        torch.testing.assert_close(result["path"][-1], agreed)


def test_overlap_applies_the_correction_one_round_late():
    found = run_threads(train, WORKERS, spec.Average(every=4, overlap=True))
    hand = ByHand()
    sent, corrections = None, None
    for step in range(STEPS):
        hand.local_step(step)
        if (step + 1) % 4 == 0:
            if corrections is not None:
                hand.set_all([w + c for w, c in zip(hand.weights(), corrections, strict=True)])
            average_buffers(hand.models)
            sent = hand.weights()
            corrections = [hand.mean() - own for own in sent]
        for rank, own in enumerate(hand.weights()):
            torch.testing.assert_close(found[rank]["path"][step], own)
    assert torch.equal(found[0]["settled"], found[1]["settled"])


def average_buffers(models):
    """As the exchange does, though a training forward never sees them."""
    mean = torch.stack([model[1].running_var for model in models]).mean(dim=0)
    for model in models:
        model[1].running_var.copy_(mean)


def test_batch_norm_buffers_are_averaged_and_counted_steps_are_kept():
    found = run_threads(train, WORKERS, spec.Average(every=STEPS))
    assert torch.equal(found[0]["buffers"], found[1]["buffers"])
    alone = [copy.deepcopy(model_of()) for _ in range(WORKERS)]
    for rank, model in enumerate(alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(STEPS):
            local_step(model, optimizer, rank, step)
    mean = torch.stack([model[1].running_var for model in alone]).mean(dim=0)
    torch.testing.assert_close(found[0]["buffers"], mean)


@pytest.mark.parametrize("state", [False, True])
def test_optimizer_state_is_averaged_where_asked(state):
    found = run_threads(train, WORKERS, spec.Average(every=4, state=state), 0.9)
    first, second = (result["momentum"][0] for result in found[:2])
    assert torch.equal(first, second) == state


def test_counts_what_it_saves_against_ring():
    counted = run_threads(train, WORKERS, spec.Average(every=4))[0]["counters"]
    weights_bytes = 4 * sum(p.numel() for p in model_of().parameters())
    per_byte = 2 * (WORKERS - 1) / WORKERS
    assert counted["rounds"] == STEPS / 4
    assert counted["exchanged_bytes_by_ring"] == round(STEPS * weights_bytes * per_byte)
    buffers_bytes = 4 * 2 * 8
    exchanged = round(3 * (weights_bytes + buffers_bytes) * per_byte)
    assert counted["exchanged_bytes"] == exchanged
    assert counted["saved_bytes"] == round(STEPS * weights_bytes * per_byte) - exchanged


def train_with_a_part_unused(collective, context, since):
    """Both use a part of the model, and worker 0 all of it from a step on."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    architecture = AverageArchitecture(spec.Average(state=True), context, collective)
    architecture.distribute(Trained(model, [optimizer]))
    for step in range(3):
        used = model[0](torch.ones(1, 2))
        uses_all = step >= since and context.identity.rank == 0
        (model[1](used) if uses_all else used).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("since", [0, 1])
def test_state_of_different_parameters_is_an_error_before_a_mean_of_it(since):
    with pytest.raises(ExchangeError, match="different parameters"):
        run_threads(train_with_a_part_unused, 2, since)
