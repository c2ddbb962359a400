"""Scripts whose models are unusual, or several, or trained in part."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import paceline
from tests.scripts.harness import (
    NUM_INPUTS,
    Net,
    batches,
    descend,
    distributed,
    script,
    take_step,
    trained,
)


def words(x):
    """Turn inputs into numbers of rows, from 0 to 18."""
    return (x * 3).long().clamp(-9, 9) + 9


@script(averages=True)
def attention():
    """A transformer layer, with torch's fast paths in evaluation."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(batches()):
        descend(optimizer, F.mse_loss(model(x[:, :, None].expand(-1, -1, 8))[:, 0, :1], y))
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                output = model(x[:, :, None].expand(-1, -1, 8))[:, 0, :1]
            losses.append(paceline.mean(F.mse_loss(output, y)))
            model.train()
    return model, {"losses": losses}


@script(averages=True)
def lstm():
    """A recurrent layer, whose weights torch keeps in a list of its own."""
    model = nn.ModuleList([nn.LSTM(1, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)])
    model, optimizer = distributed(model)
    for x, y in batches():
        optimizer.zero_grad()
        states, _ = model[0](x[:, :, None])
        F.mse_loss(model[1](states[:, -1]), y).backward()
        optimizer.step()
    return model


@script(everywhere="alike", modes="trains", averaging_seldom="alike")
def batch_norm():
    """Batch norm: workers see different samples, and end with one model."""
    model = nn.Sequential(nn.Linear(NUM_INPUTS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.05)
    for x, y in batches():
        take_step(model, optimizer, x, y)
    paceline.settle()
    return model, {"statistics": model.buffers()}


@script(averages=True)
def embedding():
    """An embedding with dense gradients."""
    model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(4 * NUM_INPUTS, 1))
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.1)
    for x, y in batches():
        descend(optimizer, F.mse_loss(model(words(x)), y))
    return model


@script(averages=True, everywhere="refused: sparse", averaging="trains")
def embedding_sparse():
    """An embedding with sparse gradients."""
    embedding = nn.Embedding(20, 4, sparse=True)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(4 * NUM_INPUTS, 1))
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.1)
    for x, y in batches():
        descend(optimizer, F.mse_loss(model(words(x)), y))
    return model


@script(everywhere="refused: 0 has max_norm=0.5", averaging="trains")
def embedding_max_norm():
    """An embedding that bounds the norm of the rows it looks up, in place."""
    embedding = nn.Embedding(20, 4, max_norm=0.5)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(4 * NUM_INPUTS, 1))
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.1)
    for x, y in batches():
        descend(optimizer, F.mse_loss(model(words(x)), y))
    return model


@script(modes="refused: changes weights outside the optimizer")
def embedding_max_norm_by_hand():
    """The norm of an embedding's rows is bounded after each step: the fix for `max_norm`."""
    embedding = nn.Embedding(20, 4)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(4 * NUM_INPUTS, 1))
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.1)
    for x, y in batches():
        descend(optimizer, F.mse_loss(model(words(x)), y))
        with torch.no_grad():
            embedding.weight.renorm_(2.0, 0, 0.5)
    return model


@script(
    everywhere="refused: weights have become different",
    updating="refused: embedding changes weights while it reads them",
    modes="refused: embedding changes weights while it reads them",
    averaging="trains",
)
def rewrites_in_forward():
    """A function looks up rows of a weight and bounds their norm in place, as it reads them."""
    embedding = nn.Embedding(20, 4)
    head = nn.Linear(4 * NUM_INPUTS, 1)
    model = nn.ModuleList([embedding, head])
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        rows = F.embedding(words(x), embedding.weight, max_norm=0.5)
        F.mse_loss(head(rows.flatten(1)), y).backward()
        optimizer.step()
    return model


@script(averages=True)
def empty_parameters():
    """The only parameter has no elements."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.mean() + self.nothing.sum()

    model, optimizer = distributed(Empty(), torch.optim.Adam, lr=0.1)
    for x, _ in batches():
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    return model


@script(averages=True)
def tied_weights():
    """Two layers have one weight."""
    model = nn.Sequential(
        nn.Linear(NUM_INPUTS, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)
    )
    model[2].weight = model[0].weight
    model, optimizer = distributed(model)
    return trained(model, optimizer)


@script(averages=True)
def weight_norm():
    """A layer's weight is computed from direction and length."""
    model = Net()
    parametrizations.weight_norm(model.first)
    model, optimizer = distributed(model)
    return trained(model, optimizer)


@script(averages=True)
def spectral_norm():
    """A layer's weight is computed: divided by its spectral norm."""
    model = Net()
    parametrizations.spectral_norm(model.first)
    model, optimizer = distributed(model)
    return trained(model, optimizer)


@script(averages=True, modes="refused: fix: ")
def parametrizes_later():
    """A layer becomes orthogonal in the middle of training: torch sets the weight's memory anew."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.1)
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step == 4:
            parametrizations.orthogonal(model.first)
    return model, {"orthogonal": model.first.weight}


@script()
def routes_samples():
    """Each sample goes to one of two experts; a worker may have none for one of them."""
    model = nn.ModuleList([Net(), Net()])
    model, optimizer = distributed(model, torch.optim.Adam, lr=0.01)
    for x, y in batches(batch=8):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for expert, chosen in ((model[0], x[:, 0] > 0.7), (model[1], x[:, 0] <= 0.7)):
            if chosen.any():
                loss = loss + (expert(x[chosen]) - y[chosen]).pow(2).sum() / len(x)
        loss.backward()
        optimizer.step()
    return model


@script()
def layer_drop():
    """A layer is left out in some steps, and Adam counts its steps without them."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    for step, (x, y) in enumerate(batches()):
        descend(
            optimizer, F.mse_loss(model(x) if step % 3 else model.encode(x).sum(1, keepdim=True), y)
        )
    return model


@script()
def layer_drop_zeroed():
    """A layer is left out in some steps, with gradients of zero in its place."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(x) if step % 3 else model.encode(x).sum(1, keepdim=True), y).backward()
        optimizer.step()
    return model


@script()
def unused_parameters():
    """Some parameters never get a gradient."""
    model, optimizer = distributed(Net(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for x, y in batches():
        descend(optimizer, F.mse_loss(torch.tanh(model.first(x)).sum(1, keepdim=True), y))
    return model


@script(averages=True)
def temperature():
    """The optimizer trains a parameter that is in no module."""
    model = Net()
    temperature = nn.Parameter(torch.tensor([0.3]))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.05, momentum=0.9)
    model, optimizer = paceline.distribute(model, optimizer)
    for x, y in batches():
        descend(optimizer, F.mse_loss(model(x) * temperature.exp(), y))
    return model, {"temperature": temperature}


@script(averages=True)
def plain_tensor():
    """The optimizer trains a tensor that is no parameter, different on each worker at first."""
    model = Net()
    shift = torch.full((NUM_INPUTS,), float(paceline.rank()), requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), shift], lr=0.1)
    model, optimizer = paceline.distribute(model, optimizer)
    for x, y in batches():
        descend(optimizer, F.mse_loss(model(x + shift), y))
    return model, {"shift": shift}


@script(averages=True, modes="drifts", averaging_seldom="drifts")
def teacher_inside():
    """The frozen teacher is part of the model, and follows it as an average."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = Net()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    model = Pair()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = paceline.distribute(model, optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model.student(x), y) + F.mse_loss(model.student(x), model.teacher(x))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
            for mean, parameter in pairs:
                mean.lerp_(parameter, 0.1)
    return model
