"""Scripts that call a model in another way than `model(x)`, compile it, or recompute parts."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

import paceline
from tests.scripts.harness import (
    Net,
    backward,
    batches,
    descend,
    distributed,
    loader,
    script,
    take_step,
    trained,
)


@script(averages=True)
def three_lines():
    """The loop of the README: three lines more than without Paceline."""
    model, optimizer = distributed()
    return trained(model, optimizer)


@script(averages=True)
def keeps_own_model():
    """What distribute returns is not used."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    paceline.distribute(model, optimizer)
    return trained(model, optimizer)


@script(averages=True)
def calls_forward():
    """The model is never called: its forward is."""
    model, optimizer = distributed()
    for x, y in batches():
        descend(optimizer, F.mse_loss(model.forward(x), y))
    return model


@script(averages=True)
def calls_encode():
    """Parts of the model are called, and the whole never."""
    model, optimizer = distributed()
    for x, y in batches():
        descend(optimizer, F.mse_loss(model.last(model.encode(x)), y))
    return model


@script(averages=True)
def training_step():
    """The model computes its own loss in a method."""

    class Learner(Net):
        def training_step(self, x, y):
            return F.mse_loss(self(x), y)

    model, optimizer = distributed(Learner())
    for x, y in batches():
        optimizer.zero_grad()
        model.training_step(x, y).backward()
        optimizer.step()
    return model


@script(averages=True)
def functional_call():
    """torch.func.functional_call with the model's own parameters."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad()
        outputs = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        F.mse_loss(outputs, y).backward()
        optimizer.step()
    return model


@script(averages=True)
def functional_forward():
    """The weights are used without any module being called."""
    model, optimizer = distributed()
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(
            F.linear(
                torch.tanh(F.linear(x, model.first.weight, model.first.bias)),
                model.last.weight,
                model.last.bias,
            ),
            y,
        )
        loss.backward()
        optimizer.step()
    return model


@script(averages=True)
def module_hooks():
    """Hooks on modules look at outputs and change gradients."""
    model, optimizer = distributed()
    seen = []
    model.first.register_forward_hook(lambda module, _, output: seen.append(module.weight.norm()))
    model.last.register_full_backward_pre_hook(
        lambda _, gradients: tuple(g * 0.5 for g in gradients)
    )
    for x, y in batches():
        take_step(model, optimizer, x, y)
    return model, {"seen": seen}


@script(averages=True)
def closure_sgd():
    """SGD is given a closure."""
    model, optimizer = distributed()
    for x, y in batches():

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@script(averages=True)
def checkpoints():
    """A layer is computed again in backward."""
    model, optimizer = distributed()
    for x, y in batches():
        descend(
            optimizer, F.mse_loss(model.last(checkpoint(model.encode, x, use_reentrant=False)), y)
        )
    return model


@script(averages=True)
def checkpoints_reentrant():
    """A layer is computed again by a backward inside backward."""
    model, optimizer = distributed()
    for x, y in batches():
        x.requires_grad_(True)
        descend(
            optimizer, F.mse_loss(model.last(checkpoint(model.encode, x, use_reentrant=True)), y)
        )
    return model


@script(
    averages=True,
    everywhere="refused: write checkpoint(..., use_reentrant=False)",
    averaging="trains",
    modes="refused: write checkpoint(..., use_reentrant=False)",
)
def checkpoints_reentrant_tied():
    """A layer is used outside a reentrant checkpoint, then inside of one."""
    model, optimizer = distributed()
    for x, y in batches():
        x.requires_grad_(True)
        optimizer.zero_grad()
        inside = checkpoint(model.encode, x, use_reentrant=True)
        outputs = model.last(inside + model.encode(x * 0.5))
        F.mse_loss(outputs, y).backward()
        optimizer.step()
    return model


@script(averages=True)
def checkpoints_reentrant_twice():
    """Two checkpoints share a layer: its gradient is made in two passes inside one."""
    model, optimizer = distributed(lr=0.05)  # with momentum, asynchronous updates diverge
    for x, y in batches():
        x.requires_grad_(True)
        optimizer.zero_grad()
        parts = [checkpoint(model.encode, x * scale, use_reentrant=True) for scale in (1.0, 0.5)]
        F.mse_loss(model.last(sum(parts)), y).backward()
        optimizer.step()
    return model


@script(averages=True)
def compiles():
    """torch.compile gives another module, distributed before."""
    model, optimizer = distributed()
    compiled = torch.compile(model, backend="aot_eager")
    for x, y in batches():
        descend(optimizer, F.mse_loss(compiled(x), y))
    return model


@script(averages=True)
def compiles_before():
    """torch.compile gives another module, which is distributed."""
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model = torch.compile(plain, backend="aot_eager")
    model, optimizer = paceline.distribute(model, optimizer)
    return trained(model, optimizer)


@script(averages=True)
def compiles_in_place():
    """The model compiles its own forward pass."""
    model, optimizer = distributed()
    model.compile(backend="aot_eager")
    return trained(model, optimizer)


@script()
def step_is_compiled():
    """The optimizer's step is compiled, as torch's own tutorial has it."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    data = batches(batch=17)

    @torch.compile(backend="eager")
    def step():
        optimizer.step()

    for _ in range(2):
        for x, y in data:
            backward(model, optimizer, x, y)
            step()
    return model


@script()
def whole_step_is_compiled():
    """A whole step is compiled: forward, backward and update."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.1)
    data = batches(batch=17)

    @torch.compile(backend="eager")
    def step(x, y):
        take_step(model, optimizer, x, y)

    for _ in range(2):
        for x, y in data:
            step(x, y)
    return model


@script()
def scripted_later():
    """The model is scripted after it was distributed: compiled code reads weights past Python."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    traced = torch.jit.trace(model, torch.ones(4, 6))
    for x, y in batches():
        descend(optimizer, F.mse_loss(traced(x), y))
    return model


@script(averages=True)
def partial_batch():
    """The last batch is smaller than the others, and some workers have less of it."""
    model, optimizer = distributed()
    samples = Subset(loader().dataset, range(37))
    data = paceline.shard(DataLoader(samples, batch_size=16), batch="global")
    for _ in range(3):
        for x, y in data:
            take_step(model, optimizer, x, y)
    return model, {"batches": [float(len(data))]}
