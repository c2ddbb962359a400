"""Scripts that clip, scale, make or keep gradients."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.harness import Net, backward, batches, distributed, script, trained


@script(modes="trains")
def clips_norm():
    """Clipping by global norm, torch's own."""
    model, optimizer = distributed()
    norms = []
    for x, y in batches():
        backward(model, optimizer, x, y)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
    return model, {"norms": norms}


@script()
def clips_norm_ours():
    """Clipping by global norm with paceline.clip_grad_norm_."""
    model, optimizer = distributed()
    norms = []
    for x, y in batches():
        backward(model, optimizer, x, y)
        norms.append(paceline.clip_grad_norm_(0.3, model))
        optimizer.step()
    return model, {"norms": norms}


@script(updating="refused: gone to the servers already")
def clips_norm_later():
    """Clipping begins with the fourth step."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        backward(model, optimizer, x, y)
        if step >= 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


@script()
def clips_value():
    """Clipping by value."""
    model, optimizer = distributed()
    for x, y in batches():
        backward(model, optimizer, x, y)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
    return model


@script()
def clips_layers_apart():
    """Each layer is clipped by its own norm."""
    model, optimizer = distributed()
    for x, y in batches():
        backward(model, optimizer, x, y)
        for layer in (model.first, model.last):
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
        optimizer.step()
    return model


@script(modes="trains")
def clips_and_reads():
    """Weights are read between clipping and the step."""
    model, optimizer = distributed()
    norms = []
    for x, y in batches():
        backward(model, optimizer, x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        norms.append(sum(parameter.norm() for parameter in model.parameters()))
        optimizer.step()
    return model, {"norms": norms}


@script()
def clips_in_hook():
    """A hook on each parameter clips its gradient as it is made."""
    model = Net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    model, optimizer = distributed(model)
    return trained(model, optimizer)


@script(
    everywhere="refused: a hook on a trained tensor was registered after distribute",
    modes="trains",
    averaging="trains",
)
def clips_in_late_hook():
    """A hook that clips gradients as they are made is registered after distribute."""
    model, optimizer = distributed()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return trained(model, optimizer)


@script()
def accumulation_hooks():
    """Hooks that run once a gradient is there clip it; one is registered after distribute."""

    def clip(parameter):
        parameter.grad.clamp_(-0.05, 0.05)

    model = Net()
    model.first.weight.register_post_accumulate_grad_hook(clip)
    model, optimizer = distributed(model)
    model.last.weight.register_post_accumulate_grad_hook(clip)
    return trained(model, optimizer)


@script(averages=True)
def tensor_hooks():
    """A hook on a parameter changes its gradient as it is made."""
    model = Net()
    model.first.weight.register_hook(lambda gradient: gradient * 0.1)
    model, optimizer = distributed(model)
    return trained(model, optimizer)


@script()
def step_hooks():
    """A hook on the optimizer clips before each step."""
    model, optimizer = distributed()
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    )
    return trained(model, optimizer)


@script(averages=True)
def scales_gradients():
    """Gradients are halved between backward and step."""
    model, optimizer = distributed()
    for x, y in batches():
        backward(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
    return model


@script(averages=True, updating="refused: gone to the servers already")
def scales_gradients_later():
    """Gradients are halved from the fourth step on."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        backward(model, optimizer, x, y)
        if step >= 3:
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        optimizer.step()
    return model


@script(averages=True)
def scales_one_layer():
    """One layer's gradients are scaled."""
    model, optimizer = distributed()
    for x, y in batches():
        backward(model, optimizer, x, y)
        model.first.weight.grad *= 0.1
        optimizer.step()
    return model


@script()
def scales_grad_data():
    """Gradients are clamped through their data."""
    model, optimizer = distributed()
    for x, y in batches():
        backward(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.05, 0.05)
        optimizer.step()
    return model


@script(averages=True)
def adds_noise():
    """Noise is added to gradients, the same on every worker."""
    model, optimizer = distributed()
    for x, y in batches():
        backward(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter) * 0.01)
        optimizer.step()
    return model


@script(averages=True)
def grad_scaler():
    """A GradScaler scales the loss and looks for infinite gradients."""
    model, optimizer = distributed()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, {"scale": [scaler.get_scale()]}


@script()
def grad_scaler_clips():
    """A GradScaler, unscaled for clipping, with one overflow."""
    model, optimizer = distributed()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * (float("inf") if step == 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    return model, {"scale": [scaler.get_scale()]}


@script(averages=True)
def autograd_grad():
    """Gradients are made by torch.autograd.grad and set by hand."""
    model, optimizer = distributed()
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        weights = list(model.parameters())
        for parameter, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


@script(averages=True)
def functional_gradients():
    """Gradients are made by torch.func.grad and set by hand."""
    model, optimizer = distributed()

    def loss_of(weights, x, y):
        return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    for x, y in batches():
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        gradients = torch.func.grad(loss_of)(weights, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
    return model


@script(
    averages=True, updating="refused: needs a gradient that has gone to the servers", modes="trains"
)
def sets_gradients_in_place():
    """Gradients are made by hand and written over the old ones."""
    model, optimizer = distributed()
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        weights = list(model.parameters())
        for parameter, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(gradient)
        optimizer.step()
    return model


@script()
def flat_gradients():
    """Gradients lie in one buffer of the script's, which it clears and scales as a whole."""
    model, optimizer = distributed()
    weights = list(model.parameters())
    flat = torch.zeros(sum(weight.numel() for weight in weights))
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.grad = part.view_as(weight)
    for x, y in batches():
        flat.zero_()
        F.mse_loss(model(x), y).backward()
        flat.mul_(0.5)
        optimizer.step()
    return model


@script()
def cuts_gradients():
    """Gradients that autograd cuts from one of `torch.cat` share memory."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad()
        joined = torch.cat([model.first.weight.flatten(), model.first.bias])
        hidden = torch.tanh(F.linear(x, joined[:48].view(8, 6), joined[48:]))
        F.mse_loss(model.last(hidden), y).backward()
        optimizer.step()
    return model


@script()
def lists_gradients():
    """A list of the gradients of the first step is what the script clears in all later ones."""
    model, optimizer = distributed()
    gradients = []
    for x, y in batches():
        for gradient in gradients:
            gradient.zero_()
        F.mse_loss(model(x), y).backward()
        gradients = gradients or [weight.grad for weight in model.parameters()]
        optimizer.step()
    return model


@script(averages=True)
def keeps_gradients():
    """Holds on to the gradients of the step before, and uses them beside the new ones."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.1)
    before = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in batches():
        backward(model, optimizer, x, y)
        made = [parameter.grad for parameter in model.parameters()]
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.grad = parameter.grad + 0.5 * old
        optimizer.step()
        before = made
    return model


@script(
    averages=True,
    hybrid="refused: views of gradients of an earlier step",
    servers="refused: views of gradients of an earlier step",
    servers_tcp="equal",
    modes="trains",
)
def keeps_gradient_views():
    """Holds on to views of the gradients of the step before."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.1)
    before = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in batches():
        backward(model, optimizer, x, y)
        made = [parameter.grad.view(-1) for parameter in model.parameters()]
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.grad = parameter.grad + 0.5 * old
        optimizer.step()
        before = [values.view_as(p) for values, p in zip(made, model.parameters(), strict=True)]
    return model
