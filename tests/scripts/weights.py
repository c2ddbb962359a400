"""Scripts that read or write weights themselves."""

import os
from multiprocessing import Pipe

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import paceline
from tests.scripts.harness import (
    Net,
    backward,
    batches,
    distributed,
    loader,
    script,
    take_step,
    trained,
)


@script(averages=True)
def averaged_model():
    """torch's AveragedModel follows the weights."""
    model, optimizer = distributed()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in batches():
        take_step(model, optimizer, x, y)
        average.update_parameters(model)
    return model, {"average": average}


@script(averages=True)
def ema_by_hand():
    """An average of the weights, kept by hand."""
    model, optimizer = distributed()
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in batches():
        take_step(model, optimizer, x, y)
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
    return model, {"average": average}


@script(averages=True)
def ema_swaps():
    """Evaluation with the averaged weights, which change places with the trained ones."""
    model, optimizer = distributed()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.1)
        if step % 4 == 3:
            trained = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(average)
            with torch.no_grad():
                losses.append(paceline.mean(F.mse_loss(model(x), y)))
            model.load_state_dict(trained)
    return model, {"losses": losses}


@script(averages=True)
def swa():
    """Stochastic weight averaging with its own schedule, from the middle on."""
    model, optimizer = distributed()
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step >= 5:
            average.update_parameters(model)
            scheduler.step()
    return model, {"average": average}


@script(averages=True, modes="refused: changes weights outside the optimizer")
def lookahead():
    """Slow weights follow the fast ones every fifth step, and pull them back."""
    model, optimizer = distributed()
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step % 5 == 4:
            with torch.no_grad():
                for kept, parameter in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.5)
                    parameter.copy_(kept)
    return model


@script(modes="refused: changes weights outside the optimizer")
def sam():
    """Sharpness-aware: a step to where the loss is worse, and back again with its gradients."""
    model, optimizer = distributed()
    for x, y in batches():
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * parameter.grad for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        backward(model, optimizer, x, y)
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def clamps_weights():
    """Weights are clamped after each step."""
    model, optimizer = distributed()
    for x, y in batches():
        take_step(model, optimizer, x, y)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def clamps_data():
    """Weights are clamped after each step, through their data."""
    model, optimizer = distributed()
    for x, y in batches():
        take_step(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def clamps_sometimes():
    """Weights are projected every third step."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step % 3 == 2:
            with torch.no_grad():
                model.first.weight.div_(model.first.weight.norm(dim=1, keepdim=True))
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def copies_weights():
    """Weights are copied in after each step."""
    model, optimizer = distributed()
    for x, y in batches():
        take_step(model, optimizer, x, y)
        with torch.no_grad():
            model.last.weight.copy_(model.last.weight / (1 + model.last.weight.norm()))
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def writes_vector():
    """All weights are read as one vector and written back."""
    model, optimizer = distributed()
    for x, y in batches():
        take_step(model, optimizer, x, y)
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector * 0.99, model.parameters())
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def initializes_after():
    """Weights are initialized after distribute."""
    model, optimizer = distributed()

    for layer in (model.first, model.last):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return trained(model, optimizer)


@script(averages=True, modes="refused: changes weights outside the optimizer")
def resets_layer():
    """A layer begins anew after a step: torch's initializers are given weights by name."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step == 5:
            torch.manual_seed(step)
            model.last.reset_parameters()
        if step == 7:
            torch.nn.init.orthogonal_(model.first.weight)
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def sets_elements():
    """Single elements are set after each step."""
    model, optimizer = distributed()
    for x, y in batches():
        take_step(model, optimizer, x, y)
        model.first.weight.data[0, :3] = 0.0
        model.last.weight.data[0] = model.last.weight.data[0].abs()
    return model


@script(averages=True, modes="refused: changes weights outside the optimizer")
def sets_memory():
    """A weight gets other memory by `set_`, without any sign from torch."""
    model, optimizer = distributed()
    kept = []
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step == 4:
            before = model.last.weight.detach()
            with torch.no_grad():
                model.last.weight.set_(torch.full((1, 8), 0.25))
            kept = [before, model.last.weight.detach()]  # the old memory, and the new one
    return model, {"views": kept}


@script(averages=True, modes="refused: changes weights outside the optimizer")
def replaces_data():
    """The memory of a weight is replaced by assigning its data."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if step == 4:
            model.last.weight.data = model.last.weight.data * 0.5
    return model


@script(modes="refused: changes weights outside the optimizer")
def swaps_data():
    """An average of the weights takes their place for evaluation, by their memory, and back."""
    model, optimizer = distributed(Net(), torch.optim.RMSprop, lr=0.01, momentum=0.5)
    average = [p.detach().clone() for p in model.parameters()]

    def swap() -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.data, average[number] = average[number], parameter.data

    losses = []
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
        if step % 3 == 2:
            swap()
            with torch.no_grad():
                losses += [float(F.mse_loss(model(x), y)) for x, y in loader(2)]
            swap()
    return model, {"average": average, "losses": losses}


@script(modes="refused: changes weights outside the optimizer")
def swaps_tensors():
    """Weights are swapped with others, inside and all, and the others are used too; parts of a
    batch are uneven, and gradients are clipped."""
    model, optimizer = distributed()
    others = [nn.Parameter(torch.full_like(p, 0.1)) for p in model.parameters()]
    sums = []
    for step, (x, y) in enumerate(batches(batch=15)):
        backward(model, optimizer, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step in (4, 6):
            optimizer.zero_grad()
            for parameter, other in zip(model.parameters(), others, strict=True):
                torch.utils.swap_tensors(parameter, other)
            sums += [float(other.sum()) for other in others]
    return model, {"sums": sums}


@script(modes="refused: changes weights outside the optimizer")
def loads_by_swapping():
    """`load_state_dict` swaps tensors in place of copying, which torch has a switch for; parts of a
    batch are uneven."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.manual_seed(0)
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches(batch=15)):
        take_step(model, optimizer, x, y)
        if step in (4, 6):
            model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    torch.__future__.set_swap_module_params_on_conversion(False)
    return model


@script(modes="drifts", averaging="drifts")
def sgd_by_hand():
    """Some weights are updated by hand, from their gradients."""
    model = Net()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = paceline.distribute(model, optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        model.first.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.first.parameters():
                parameter -= 0.1 * parameter.grad
    return model


@script(
    everywhere="refused: weights have become different",
    modes="refused: the script changes weights outside the optimizer",
    averaging="drifts",
)
def updates_by_hand():
    """After some steps gradients come from torch.autograd.grad, and the script updates by itself:
    each worker with its own, which no exchange sees."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.1)
    for step, (x, y) in enumerate(batches()):
        if step < 3:
            take_step(model, optimizer, x, y)
            continue
        weights = list(model.parameters())
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.1 * gradient
    paceline.settle()
    return model


@script(modes="refused: weights lie in an array")
def weights_in_an_array():
    """A weight lies in an array of numpy's, which the script reads to the end."""
    model = Net()
    array = np.linspace(-0.2, 0.2, model.first.weight.numel(), dtype=np.float32).reshape(8, -1)
    model.first.weight = torch.nn.Parameter(torch.from_numpy(array))
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.1)
    sizes = []
    for x, y in batches():
        take_step(model, optimizer, x, y)
        sizes.append(float(np.abs(array).sum()))
    return model, {"sizes": sizes}


@script(modes="refused: weights lie in an array or in shared memory")
def shares_memory():
    """Weights lie in memory that another process reads, as an actor does beside a learner."""
    torch.manual_seed(0)
    model = Net().share_memory()
    pipe, theirs = Pipe()
    if os.fork() == 0:
        pipe.close()
        weights = [weight.detach() for weight in model.parameters()]
        try:
            while theirs.recv():
                theirs.send([float(weight.sum()) for weight in weights])
        finally:
            os._exit(0)
    model, optimizer = distributed(model, torch.optim.SGD, lr=0.1)
    seen = []
    for x, y in batches():
        take_step(model, optimizer, x, y)
        pipe.send(True)
        seen += pipe.recv()
    pipe.send(False)
    os.wait()
    return model, {"seen": seen}
