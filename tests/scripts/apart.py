"""Scripts in which one worker does what the others do not."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.harness import (
    Breaks,
    backward,
    batches,
    distributed,
    script,
    take_step,
)


@script(
    everywhere="refused: worker1 ended after 8 steps",
    modes="drifts",
    averaging="refused: every worker must take the same number of steps",
)
def ends_early():
    """Worker 1 stops two steps before the others."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if paceline.rank() == 1 and step == 8:
            break
        take_step(model, optimizer, x, y)
    return model


@script(
    everywhere="refused: worker1 ended after 9 steps",
    modes="drifts",
    averaging="refused: every worker must take the same number of steps",
)
def skips_alone():
    """Worker 1 alone skips a step."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if paceline.rank() == 1 and step == 5:
            continue
        take_step(model, optimizer, x, y)
    return model


@script(everywhere="refused: ", modes="drifts")
def catches_backward_alone():
    """One worker's backward pass breaks off, and it alone skips the batch."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        out = model.last(Breaks.apply(model.encode(x), step == 4 and paceline.rank() == 1))
        try:
            F.mse_loss(out, y).backward()
        except MemoryError:
            continue
        optimizer.step()
    return model


@script(
    ring="refused: weights have become different",
    hybrid="refused: weights have become different",
    servers="refused: weights have become different",
    updating="refused: has set its optimizer otherwise than the others",
    modes="refused: has set its optimizer otherwise than the others",
    asynchronous="trains",
    quorum="trains",
    averaging="trains",
)
def rate_alone():
    """Each worker lowers its rate by its own loss."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step > 2:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + paceline.rank())
        take_step(model, optimizer, x, y)
    return model


@script(
    everywhere="refused: ",
    modes="refused: changes weights outside the optimizer",
    averaging="trains",
)
def writes_alone():
    """Worker 1 alone changes weights."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        take_step(model, optimizer, x, y)
        if paceline.rank() == 1 and step == 5:
            with torch.no_grad():
                model.last.bias.add_(1.0)
    return model


@script(
    everywhere="refused: weights have become different",
    updating="refused: gradients were cleared or replaced",
    modes="trains",
    averaging="trains",
)
def zeroes_alone():
    """Worker 1 alone drops its gradients once, at a rate so small that weights hardly differ."""
    model, optimizer = distributed(lr=1e-3)
    for step, (x, y) in enumerate(batches()):
        backward(model, optimizer, x, y)
        if paceline.rank() == 1 and step == 3:
            optimizer.zero_grad()
        optimizer.step()
    return model


@script(averages=True)
def reads_gradients_alone():
    """Worker 0 alone looks at gradients."""
    model, optimizer = distributed()
    for x, y in batches():
        backward(model, optimizer, x, y)
        if paceline.is_main():
            model.first.weight.grad.norm()
        optimizer.step()
    return model
