"""Scripts that gather gradients over several passes, clear them in their own way, or skip steps."""

import contextlib

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.harness import (
    Breaks,
    Net,
    batches,
    distributed,
    script,
    take_step,
)


@script(averages=True)
def accumulates():
    """Two batches make one step, without no_sync."""
    model, optimizer = distributed()
    for number, (x, y) in enumerate(batches(16)):
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


@script(averages=True)
def accumulates_no_sync():
    """Two batches make one step; the first one's gradients are not exchanged."""
    model, optimizer = distributed()
    for number, (x, y) in enumerate(batches(16)):
        is_last = number % 2 == 1
        with contextlib.nullcontext() if is_last else paceline.no_sync():
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def accumulates_and_clips():
    """Accumulation, then clipping by norm."""
    model, optimizer = distributed()
    for number, (x, y) in enumerate(batches(16)):
        loss = F.mse_loss(model(x), y) / 2
        if number % 2 == 0:
            with paceline.no_sync():
                loss.backward()
            continue
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return model


@script(
    averages=True,
    updating="refused: Write server:update=worker",
)
def accumulates_later():
    """Accumulation begins in the middle."""
    model, optimizer = distributed()
    pending = 0
    for number, (x, y) in enumerate(batches(16)):
        F.mse_loss(model(x), y).backward()
        pending += 1
        if number < 6 or pending == 2:
            optimizer.step()
            optimizer.zero_grad()
            pending = 0
    return model


@script(averages=True)
def micro_step_loop():
    """Every step draws several batches in an inner loop."""
    model, optimizer = distributed()
    data = iter(batches(20))
    for _ in range(5):
        for _ in range(4):
            x, y = next(data)
            (F.mse_loss(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


@script(averages=True)
def no_sync_backward():
    """no_sync surrounds every backward: the step exchanges."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        with paceline.no_sync():
            loss.backward()
        optimizer.step()
    return model


@script(
    ring="refused: before they are averaged",
    hybrid="refused: before they are averaged",
    servers="refused: before they are averaged",
    modes="trains",
)
def no_sync_clips():
    """Every backward pass is inside `no_sync`, and what they made is clipped before the step."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad()
        with paceline.no_sync():
            F.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


@script(averages=True)
def no_sync_zeroes_in_place():
    """no_sync surrounds every backward, and gradients are zeroed in place."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        with paceline.no_sync():
            F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@script(
    ring="refused: before they are averaged",
    hybrid="refused: before they are averaged",
    servers="refused: before they are averaged",
    modes="trains",
)
def clips_each_pass():
    """Gradients are clipped after each backward pass, all but the last inside `no_sync`."""
    model, optimizer = distributed()
    for number, (x, y) in enumerate(batches()):
        loss = F.mse_loss(model(x), y) / 2
        if number % 2 == 0:
            with paceline.no_sync():
                loss.backward()
        else:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@script()
def never_zeroes():
    """Gradients are never cleared: each step adds to them."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.02)
    for x, y in batches():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@script(averages=True)
def zeroes_by_hand():
    """Gradients are set to None by hand."""
    model, optimizer = distributed()
    for x, y in batches():
        for parameter in model.parameters():
            parameter.grad = None
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@script(averages=True)
def zeroes_in_place():
    """Gradients are set to zero, not to None."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@script(averages=True)
def skips_bad_step():
    """A step is skipped on all workers when the loss is bad."""
    model, optimizer = distributed()
    losses = []
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y + 5 * (step in (4, 7)))
        losses.append(paceline.mean(loss))
        if losses[-1] > 10:
            continue
        loss.backward()
        optimizer.step()
    return model, {"losses": losses}


@script(
    averages=True,
    updating="refused: Write server:update=worker",
)
def skips_after_backward():
    """A step is skipped on all workers after its backward."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y + 5 * (step in (4, 7)))
        loss.backward()
        if paceline.mean(loss) > 10:
            continue
        optimizer.step()
    return model


@script(
    averages=True,
    updating="refused: backward() raised MemoryError",
)
def catches_backward():
    """A backward pass breaks off on all workers, and its batch is skipped."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        out = model.last(Breaks.apply(model.encode(x), step in (4, 7)))
        try:
            F.mse_loss(out, y).backward()
        except MemoryError:
            continue
        optimizer.step()
    return model


@script(averages=True)
def catches_backward_first():
    """Backward passes break off on all workers, one in the first step."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        out = model.last(Breaks.apply(model.encode(x), step in (0, 4)))
        try:
            F.mse_loss(out, y).backward()
        except MemoryError:
            continue
        optimizer.step()
    return model


@script(averages=True)
def catches_backward_keeps():
    """What a broken backward pass has made counts in the next step."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        out = model.last(Breaks.apply(model.encode(x), step in (0, 4)))
        try:
            F.mse_loss(out, y).backward()
        except MemoryError:
            continue
        optimizer.step()
        optimizer.zero_grad()
    return model


@script(averages=True)
def catches_backward_no_sync():
    """A backward pass that may break off runs inside no_sync."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        out = model.last(Breaks.apply(model.encode(x), step in (4, 7)))
        try:
            with paceline.no_sync():
                F.mse_loss(out, y).backward()
        except MemoryError:
            continue
        optimizer.step()
    return model


@script(averages=True, updating="refused: backward() raised MemoryError")
def catches_backward_steps():
    """A step is taken with what a broken backward pass has made."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        out = model.last(Breaks.apply(model.encode(x), step in (0, 4)))
        with contextlib.suppress(MemoryError):
            F.mse_loss(out, y).backward()
        optimizer.step()
    return model


@script(
    everywhere="refused: registered after distribute",
    asynchronous="trains",
    bounded="trains",
    quorum="trains",
    averaging="trains",
)
def catches_refusal():
    """A loop that catches every exception goes on after a refusal, and trains nothing."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.1)
    model.last.weight.register_hook(lambda gradient: gradient * 0.5)
    for x, y in batches():
        with contextlib.suppress(Exception):
            take_step(model, optimizer, x, y)
    return model
