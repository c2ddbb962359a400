"""Loss curves of tiny trainings: synchronous architectures must train like one worker."""

import numpy as np
import torch
from torch import nn

from paceline import data
from paceline.session.loader.sharding import gradient_scale
from paceline.session.session import Session

STEPS, GLOBAL_BATCH, SAMPLES = 50, 24, 240


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 20, generator=generator)
    targets = (inputs @ torch.randn(20, 3, generator=generator)).argmax(dim=1)
    return inputs, targets


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def loss_curve(
    session: Session, shares: list[float] | None = None, **optimizer: float
) -> list[float]:
    """This worker's part of each step's loss: its mean, weighted by its share of the batch."""
    inputs, targets = samples()
    model: nn.Module = small_model()
    if session.rank != 0:  # only worker 0's start may count
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    chosen = torch.optim.SGD(model.parameters(), lr=0.1, **{"momentum": 0.9, **optimizer})
    model, chosen = session.distribute(model, chosen)
    shares = shares or [1.0] * session.workers
    session.gradients.scale_by(gradient_scale(GLOBAL_BATCH, shares, session.rank))
    batches = data.GlobalBatches(SAMPLES, GLOBAL_BATCH, seed=1)
    parts = []
    for step in range(STEPS):
        indices = batches.indices(step)
        own = indices[data.split(len(indices), shares)[session.rank]]
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        chosen.zero_grad()
        loss.backward()
        session.report_loss(loss)
        chosen.step()
        parts.append(float(loss.detach()) * len(own) / GLOBAL_BATCH)
    assert session.architecture is not None
    session.architecture.settle()
    return parts


def whole(parts: list[list[float]]) -> np.ndarray:
    """The loss of each step over the global batch, from every worker's part."""
    return np.sum(np.array(parts), axis=0)


def largest_difference(curve: np.ndarray, reference: np.ndarray) -> float:
    """The largest relative difference between two loss curves."""
    return float(np.max(np.abs(curve - reference) / np.abs(reference)))
