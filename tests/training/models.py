"""Models for the loop's tests, named to it as "module:function"."""

import time

import torch
from torch import nn

from paceline.training.session import init


def broken_on_worker_1() -> nn.Module:
    """Cannot be built on worker 1."""
    if init().rank == 1:
        time.sleep(0.5)
        raise RuntimeError("planted failure")
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def with_dropout(num_classes: int) -> nn.Module:
    """Draws random numbers in every step."""
    layers = [nn.Linear(3 * 32 * 32, 32), nn.Dropout(0.5), nn.Linear(32, num_classes)]
    return nn.Sequential(nn.Flatten(), *layers)


def on_one_thread() -> nn.Module:
    """For a member that shares this machine's cores, though it has an emulated host to itself."""
    threads = torch.get_num_threads()
    assert threads == 1, f"{threads} threads"
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def normed(num_classes: int) -> nn.Module:
    """Keeps statistics of the batches that it saw."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 6 * 6, num_classes))
