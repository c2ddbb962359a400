"""Scripts that save, copy and resume."""

import copy
import io

import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations

import paceline
from tests.scripts.harness import (
    Net,
    batches,
    descend,
    distributed,
    loader,
    script,
    take_step,
    trained,
)


@script(averages=True)
def deepcopies():
    """Copies of the model are taken during training, and trained on their own."""
    model, optimizer = distributed()
    copies = []
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step in (0, 6):
            copies.append(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in copies[0].parameters():
            parameter.mul_(2)
    is_plain = type(copies[1]) is Net
    return model, {"copies": copies, "is plain": float(is_plain)}


@script()
def resumes():
    """Model and optimizer are saved in the middle and taken back later."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    saved = None
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step == 4:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 7:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return model


@script()
def resumes_after():
    """Model and optimizer take up a checkpoint after distribute."""
    earlier = Net()
    optimizer = torch.optim.Adam(earlier.parameters(), lr=0.01)
    for x, y in loader(3):
        descend(optimizer, F.mse_loss(earlier(x), y))
    state = optimizer.state_dict()
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    model.load_state_dict(earlier.state_dict())
    optimizer.load_state_dict(state)
    return trained(model, optimizer)


@script()
def resumes_before():
    """Model and optimizer take up a checkpoint before distribute."""
    earlier = Net()
    optimizer = torch.optim.Adam(earlier.parameters(), lr=0.01)
    for x, y in loader(3):
        descend(optimizer, F.mse_loss(earlier(x), y))
    model = Net()
    model.load_state_dict(earlier.state_dict())
    state = optimizer.state_dict()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(state)
    model, optimizer = paceline.distribute(model, optimizer)
    return trained(model, optimizer)


@script(averages=True)
def saves_model():
    """The whole model is saved during training, loaded by the class it had, and another one made of
    it."""
    model, optimizer = distributed()
    saved = io.BytesIO()
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step == 5:
            torch.save(model, saved)
    saved.seek(0)
    with torch.serialization.safe_globals([Net, torch.nn.Linear]):
        loaded = torch.load(saved)
    another = model.__class__()
    parametrizations.weight_norm(another.first)
    is_plain = type(loaded) is type(another) is model.__class__ is Net
    return model, {"loaded": loaded, "is plain": float(is_plain)}


@script(averages=True)
def saves_on_main():
    """Worker 0 alone saves, after all have settled."""
    model, optimizer = distributed()
    norms = []
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step % 4 == 3:
            paceline.settle()
            if paceline.is_main():
                saved = model.state_dict()
                norms += [float(value.norm()) for value in saved.values()]
                optimizer.state_dict()
    return model, {"norms": norms if paceline.is_main() else []}
