"""Shares by measured speed: in proportion, the same on every worker, and the same loss curve."""

import numpy as np
import pytest
import torch
from torch import nn

from paceline import data, spec
from paceline.builtin.balance import balance, shares_for, speed
from paceline.record import Step
from paceline.session.loader.sharding import division, gradient_scale
from paceline.testing import run_members
from tests.support.curves import (
    GLOBAL_BATCH,
    SAMPLES,
    largest_difference,
    samples,
    small_model,
    whole,
)


def step_of(number: int, seconds_per_sample: float, samples: int) -> Step:
    parts = {"forward": seconds_per_sample * samples, "exchange_exposed": 5.0, "wait": 3.0}
    return Step(
        step=number, start_seconds=0, end_seconds=9, breakdown_seconds=parts, samples=samples
    )


def test_speed_is_of_own_computing_and_forgives_one_slow_step():
    steps = [step_of(i, 0.01, 8) for i in range(4)] + [step_of(4, 0.5, 8)]
    assert speed(steps) == pytest.approx(100)


def test_shares_are_in_proportion_to_speed():
    assert shares_for([100, 300]) == pytest.approx([0.5, 1.5])


def train_with_a_slow_worker(session):
    """Worker 0 says it takes three times as long for a sample."""
    inputs, targets = samples()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.distribute(model, optimizer)
    batches, shares = data.GlobalBatches(SAMPLES, GLOBAL_BATCH, seed=1), [1.0] * session.workers
    losses, sizes = [], []
    for step in range(12):
        there, place = division(shares, session.participants)
        own = batches.indices(step)[data.split(GLOBAL_BATCH, there)[place]]
        session.gradients.scale_by(gradient_scale(GLOBAL_BATCH, there, place))
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) * len(own) / GLOBAL_BATCH)
        sizes.append(len(own))
        if step == 5:
            session.steps.recent.clear()
            session.steps.recent.append(
                step_of(step, 0.03 if session.rank == 0 else 0.01, len(own))
            )
            balance(session, shares)
    return losses, sizes


def test_a_slow_worker_gets_less_and_the_curve_stays():
    found = run_members(train_with_a_slow_worker, workers=2, architecture=spec.Ring())
    alone = run_members(train_with_a_slow_worker, workers=1)
    sizes = np.array([sizes for _, sizes in found])
    assert sizes[:, :6].tolist() == [[12] * 6] * 2
    assert sizes[:, 6:].tolist() == [[6] * 6, [18] * 6]
    curve = whole([losses for losses, _ in found])
    assert largest_difference(curve, np.array(alone[0][0])) < 1e-4
