"""What a worker holds of a model while it trains, counted: copies of all its numbers.

Counted where most is there, when backward has come to the model's input.
"""

import gc

import pytest
import torch
from torch import nn

from paceline import spec
from paceline.testing import run_members

NUM_LAYERS, WIDTH = 12, 512
MODEL_BYTES = 4 * NUM_LAYERS * WIDTH**2
SLACK = 0.25
"""Of a model: a layer or two on their way, and what is no parameter."""


def own_copies() -> float:
    """How many times the model's bytes this process has in tensors of its own memory."""
    gc.collect()
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        for tensor in [*tensors, *(tensor.grad for tensor in tensors if tensor.is_leaf)]:
            if tensor is not None and type(tensor).__name__ != "HeldGradient":
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    shared = [(start, stop) for start, stop, _ in segments()]
    own = [size for at, size in found.items() if not any(a <= at < b for a, b in shared)]
    return sum(own) / MODEL_BYTES


def shared_copies() -> float:
    """The same of memory that workers share, as far as this one has touched it."""
    return sum(touched for _, _, touched in segments()) / MODEL_BYTES


def segments() -> list[tuple[int, int, int]]:
    """Start and stop of each mapped segment, and its bytes that are there."""
    found: list[tuple[int, int, int]] = []
    is_segment = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                start, stop = (int(place, 16) for place in first.split("-"))
                is_segment = "/memfd:paceline" in line
            elif first == "Rss:" and is_segment:
                found.append((start, stop, 1024 * int(rest[0])))
    return found


def train(session, gradient_use):
    """(own, shared) copies in the first step and in later ones."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.distribute(model, optimizer, gradient_use=gradient_use)
    del layers
    counted: list[tuple[float, float]] = []
    for _ in range(4):
        inputs = torch.ones(2, WIDTH, requires_grad=True)
        inputs.register_hook(lambda _: counted.append((own_copies(), shared_copies())))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return counted


@pytest.mark.skipif(not gc.isenabled(), reason="tensors are found by the garbage collector")
def test_on_a_ring_gradients_exist_once_beside_the_weights():
    for counted in run_members(train, None, workers=2, architecture=spec.Ring()):
        for own, shared in counted:
            assert own < 2 + SLACK
            assert shared == 0


COLOCATED = spec.Server(placement="colocated")
LEFT, ARRIVED = 0.5, 0.5
"""Gradients that this worker serves stay where they were made until the other's have come; the rest
it has left in shared memory."""


def test_what_servers_hold_is_not_held_by_workers_too():
    for counted in run_members(train, "nothing", workers=2, architecture=COLOCATED):
        for own, shared in counted:
            assert own < LEFT + SLACK
            assert shared < 1 + LEFT + ARRIVED + SLACK


def test_where_workers_update_gradients_and_means_exist_once_beside_the_weights():
    for counted in run_members(train, None, workers=2, architecture=COLOCATED):
        for own, shared in counted:
            assert own < 1 + SLACK
            assert shared < 2 + ARRIVED + SLACK
