"""Scripts with losses of their own, and scripts that measure while they train."""

import time

import torch
import torch.nn.functional as F

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
def gradient_penalty():
    """The norm of the gradient of the inputs is part of the loss: backward through backward."""
    model, optimizer = distributed()
    for x, y in batches():
        x.requires_grad_(True)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (loss + ((gradient.norm(dim=1) - 1) ** 2).mean()).backward()
        optimizer.step()
    return model


@script(ring="trains", hybrid="trains", servers="trains", averaging="trains")
def penalizes_gradients():
    """The same penalty with the inner derivative by torch.autograd.grad. Not linear in the samples:
    a mean of the workers' penalties is not the whole batch's."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum((g**2).sum() for g in inner)).backward()
        optimizer.step()
    return model


@script(averages=True)
def penalizes_weights():
    """The weights are part of the loss."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        (loss + 0.01 * penalty).backward()
        optimizer.step()
    return model


@script(averaging="trains", everywhere="refused: torch.autograd.grad")
def differentiable_gradients():
    """A penalty on gradients that backward leaves differentiable: cannot cross an exchange."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward(create_graph=True)
        sum((p.grad**2).sum() for p in model.parameters()).backward()
        optimizer.step()
    return model


@script(averages=True)
def distillation():
    """A frozen teacher shows a student the way."""
    teacher = Net().eval().requires_grad_(False)
    model, optimizer = distributed()
    losses = []
    for x, _ in batches():
        with torch.no_grad():
            shown = teacher(x)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), shown)
        loss.backward()
        optimizer.step()
        losses.append(paceline.mean(loss))
    return model, {"losses": losses}


@script(averages=True, averaging="alike")
def evaluates():
    """Evaluation every third step; all workers see one model."""
    model, optimizer = distributed()
    losses = []
    test = loader(2)
    for step, (x, y) in enumerate(batches()):
        model.train()
        take_step(model, optimizer, x, y)
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                losses += [F.mse_loss(model(x), y) for x, y in test]
    model.eval()  # whoever looks at the model as a whole sees one
    return model, {"losses": losses}


@script(averages=True, averaging="alike")
def evaluates_sharded():
    """Every worker evaluates a part; the metric is a mean over the workers."""
    model, optimizer = distributed()
    losses = []
    test = batches(2)
    for step, (x, y) in enumerate(batches()):
        model.train()
        take_step(model, optimizer, x, y)
        if step % 3 == 2:
            model.eval()
            with torch.inference_mode():
                total = sum(F.mse_loss(model(x), y).item() for x, y in test)
            losses.append(paceline.mean(total))
    model.eval()
    return model, {"losses": losses}


@script(averages=True)
def metrics():
    """Numbers of all workers, by paceline.mean."""
    model, optimizer = distributed()
    losses, errors = [], torch.zeros(2)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(paceline.mean(loss.item()))
        errors += paceline.mean(torch.stack([loss.detach(), loss.detach().sqrt() * 0 + 1]))
    return model, {"losses": losses, "errors": errors}


@script(averages=True, updating="refused: read between backward and optimizer.step()")
def reads_between():
    """Weights are read between backward and step."""
    model, optimizer = distributed()
    norms = []
    for x, y in batches():
        backward(model, optimizer, x, y)
        norms.append(sum(parameter.norm() for parameter in model.parameters()))
        optimizer.step()
    return model, {"norms": norms}


@script(averages=True, updating="refused: read between backward and optimizer.step()")
def reads_between_later():
    """Weights are read between backward and step, in some steps."""
    model, optimizer = distributed()
    norms = []
    for step, (x, y) in enumerate(batches()):
        backward(model, optimizer, x, y)
        if step % 4 == 3:
            norms.append(sum(parameter.norm() for parameter in model.parameters()))
        optimizer.step()
    return model, {"norms": norms}


@script(averages=True, updating="refused: read between backward and optimizer.step()")
def reads_between_slowly():
    """Weights are read some time after backward, before the step."""
    model, optimizer = distributed()
    norms = []
    for step, (x, y) in enumerate(batches()):
        backward(model, optimizer, x, y)
        if step == 4:
            time.sleep(0.3)
            norms.append(sum(parameter.norm() for parameter in model.parameters()))
        optimizer.step()
    return model, {"norms": norms}


@script(averages=True)
def two_backwards():
    """Two losses of one graph, each with its backward."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss((output := model(x)), y)
        loss.backward(retain_graph=True)
        (0.1 * output.pow(2).mean()).backward()
        optimizer.step()
    return model
