"""Paceline's names, doing nothing: with this in its place a script is plain PyTorch."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch


def init():
    given.clear()
    return SimpleNamespace(rank=0, workers=1)


given = []
"""Values of each model at the moment it was distributed."""


def distribute(model, *optimizers):
    given.append([v for p in model.parameters() for v in p.detach().flatten().tolist()])
    return model, *optimizers


def shard(loader, **_):
    return loader


@contextmanager
def no_sync():
    yield


def clip_grad_norm_(max_norm, model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def mean(value):
    return value


def settle():
    pass


def barrier():
    pass


def report_loss(loss):
    pass


def rank():
    return 0


def workers():
    return 1


def is_main():
    return True
