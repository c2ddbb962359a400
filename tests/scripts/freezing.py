"""Scripts that train other tensors from some step on."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.harness import (
    Net,
    backward,
    batches,
    distributed,
    loader,
    script,
    take_step,
)


@script(averages=True)
def freezes_all():
    """In some steps nothing is trained at all."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        model.requires_grad_(step % 4 != 3)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    return model


@script(averages=True, modes="refused: trains other tensors")
def freezes_later():
    """A layer is frozen from the fifth step on."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            model.first.requires_grad_(False)
        take_step(model, optimizer, x, y)
    return model


@script(modes="refused: trains other tensors", updating="refused: gone to the servers already")
def freezes_and_keeps():
    """A layer is frozen from the fifth step on; its last gradient is kept, clipped and applied."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            model.first.requires_grad_(False)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = None
        F.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return model


@script(averages=True, modes="refused: trains other tensors")
def unfreezes_later():
    """A layer is unfrozen in the fifth step, whose batch of 7 cannot be shared evenly."""
    model = Net()
    model.first.requires_grad_(False)
    model, optimizer = distributed(model)
    data = loader().dataset
    data = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(71)), batch_size=16)
    data = paceline.shard(data, batch="global")
    for step, (x, y) in enumerate(batch for _ in range(2) for batch in data):
        if step == 4:
            model.first.requires_grad_(True)
        take_step(model, optimizer, x, y)
    return model


@script(modes="refused: trains other tensors")
def unfreezes_and_clips():
    """A layer is unfrozen after four steps; every step is clipped by its norm."""
    model = Net()
    model.first.requires_grad_(False)
    model, optimizer = distributed(model)
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            model.first.requires_grad_(True)
        backward(model, optimizer, x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


@script(averages=True, modes="refused: trains other tensors")
def alternates():
    """Layers take turns."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        model.first.requires_grad_(step % 2 == 0)
        model.last.requires_grad_(step % 2 == 1)
        take_step(model, optimizer, x, y)
    return model


@script(modes="refused: mode=sync", averaging="refused: an optimizer that distribute was not given")
def adapters_later():
    """Adapters are put into a frozen model, with an optimizer that distribute was not given."""

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer
            self.down = nn.Parameter(torch.full((2, layer.in_features), 0.1))
            self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs) + inputs @ self.down.T @ self.up.T

    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            model.requires_grad_(False)
            model.first = Adapted(model.first)
            optimizer = torch.optim.AdamW([model.first.down, model.first.up], lr=0.05)
        take_step(model, optimizer, x, y)
    return model


@script(averages=True, modes="refused: mode=sync")
def adds_group():
    """A second layer joins the optimizer later, in a group of its own."""
    model = Net()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = paceline.distribute(model, optimizer)
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            optimizer.add_param_group({"params": model.first.parameters(), "lr": 0.05})
        take_step(model, optimizer, x, y)
    return model


@script(modes="refused: trains other tensors")
def adds_group_adam():
    """Frozen at first; unfrozen and added to Adam later."""
    model = Net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.last.parameters(), lr=0.01)
    model, optimizer = paceline.distribute(model, optimizer)
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            model.first.requires_grad_(True)
            optimizer.add_param_group({"params": model.first.parameters(), "lr": 0.002})
        take_step(model, optimizer, x, y)
    return model


@script(modes="refused: mode=sync")
def moves_between_groups():
    """A parameter moves from one group of the optimizer to another."""
    model = Net()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters())}]
    groups[1]["lr"] = 0.001
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    model, optimizer = paceline.distribute(model, optimizer)
    for step, (x, y) in enumerate(batches()):
        if step == 5:
            moved = optimizer.param_groups[0]["params"].pop()
            optimizer.param_groups[1]["params"].append(moved)
        take_step(model, optimizer, x, y)
    return model


@script(averages=True, modes="refused: trains other tensors")
def weight_surgery():
    """A layer gets a new weight in the middle, and the optimizer with it."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            kept = model.last.weight
            model.last.weight = nn.Parameter(kept.detach() * 0.5)
            parameters = optimizer.param_groups[0]["params"]
            place = next(i for i, tensor in enumerate(parameters) if tensor is kept)
            parameters[place] = model.last.weight
        take_step(model, optimizer, x, y)
    return model


@script(averages=True, modes="refused: trains other tensors")
def surgery_optimizer_unaware():
    """A layer gets a new weight that the optimizer does not get."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step == 4:
            model.last.weight = nn.Parameter(model.last.weight.detach() * 0.5)
        take_step(model, optimizer, x, y)
    return model


@script(averages=True, modes="refused: the script changes weights outside the optimizer")
def doubles_later():
    """The model is trained in double precision from a later step on."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        if step >= 4:
            model.double()
            x, y = x.double(), y.double()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@script(
    averages=True,
    updating="refused: changes weights outside the optimizer",
    modes="refused: the script changes weights outside the optimizer",
)
def doubles_with_gradients():
    """The model is converted while gradients of the last step are there."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step >= 4:
            model.double()
            x, y = x.double(), y.double()
        take_step(model, optimizer, x, y)
    return model
