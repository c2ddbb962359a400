"""Scripts with other optimizers than one SGD, with schedules, and with state that they touch."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedule

import paceline
from tests.scripts.harness import Net, backward, batches, distributed, script, take_step, trained

ELEMENTWISE = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop),
]
"""Each updates every value of a weight by itself."""


@script()
def optimizers():
    """Every element-wise optimizer of torch, each with a scheduler."""
    schedulers = [
        lambda optimizer: schedule.StepLR(optimizer, 2, 0.5),
        lambda optimizer: schedule.CosineAnnealingLR(optimizer, 6),
        lambda optimizer: schedule.ExponentialLR(optimizer, 0.8),
        lambda optimizer: schedule.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ]

    models = []
    for number, make in enumerate(ELEMENTWISE):
        torch.manual_seed(0)
        model, optimizer = distributed(Net(), make, lr=0.01)
        scheduler = schedulers[number % len(schedulers)](optimizer)
        for x, y in batches(6):
            take_step(model, optimizer, x, y)
            scheduler.step()
        models.append(model)
    return models


@script()
def single_numbers():
    """Parameters of one element, alone in a model or several, with every element-wise optimizer
    whose state is saved and loaded during training."""
    settings_of = {
        "SGD": {"momentum": 0.9},
        "RMSprop": {"momentum": 0.5},
        "Adam": {"amsgrad": True},
    }
    shapes_of = [[(), (1,), ()], [()]]

    class Scales(nn.Module):
        """A sum of the inputs, times each parameter."""

        def __init__(self, shapes):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.full(s, 0.5)) for s in shapes])

        def forward(self, inputs):
            for number, scale in enumerate(self.scales):
                inputs = inputs * scale + number
            return inputs.sum(1, keepdim=True)

    models, states = [], []
    for number, make in enumerate(ELEMENTWISE):
        model = Scales(shapes_of[number % 2])
        settings = settings_of.get(make.__name__, {})
        model, optimizer = distributed(model, make, lr=0.01, **settings)
        for step, (x, y) in enumerate(batches(6)):
            take_step(model, optimizer, x, y)
            if step == 3:
                optimizer.load_state_dict(optimizer.state_dict())
        models.append(model)
        saved = optimizer.state_dict()["state"].values()
        states += [(state[name].ndim, state[name]) for state in saved for name in sorted(state)]
    return models, {"states": states}


@script()
def groups():
    """Groups with settings of their own, one of them turned in the middle."""
    model = Net()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model, optimizer = paceline.distribute(model, optimizer)
    for step, (x, y) in enumerate(batches()):
        if step == 5:
            optimizer.param_groups[1]["weight_decay"] = 0.3
        take_step(model, optimizer, x, y)
    return model


@script()
def names_parameters():
    """An optimizer that knows its parameters by name, and groups with a script's own notes."""
    model = Net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["layers"] = ["first", "last", None]
    model, optimizer = paceline.distribute(model, optimizer)
    return trained(model, optimizer)


@script(modes="refused: SignDescent cannot")
def own_optimizer():
    """An optimizer with a step of its own."""

    class SignDescent(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

    model, optimizer = distributed(Net(), SignDescent, lr=0.01)
    return trained(model, optimizer)


@script()
def own_settings():
    """An optimizer that differs from torch's in its defaults only."""

    class Careful(torch.optim.AdamW):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99))

    model = Net()
    optimizer = Careful(model.parameters())
    model, optimizer = paceline.distribute(model, optimizer)
    return trained(model, optimizer)


@script(everywhere="refused: has not called the __init__ of torch's Optimizer")
def optimizer_without_init():
    """An optimizer around another that never calls torch's own __init__."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups

        def zero_grad(self, set_to_none=True):
            self.inner.zero_grad(set_to_none)

        def step(self, closure=None):
            return self.inner.step(closure)

    model = Net()
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = paceline.distribute(model, optimizer)
    return trained(model, optimizer)


@script(everywhere="refused: without an optimizer")
def no_optimizer():
    """distribute is given no optimizer."""
    model = Net()
    paceline.distribute(model)
    return model


@script(modes="refused: LBFGS cannot")
def lbfgs():
    """LBFGS asks for the loss and its gradients several times in a step."""
    model, optimizer = distributed(Net(), torch.optim.LBFGS, lr=0.3, max_iter=4)
    for x, y in batches(6, batch=32):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@script(modes="refused: LBFGS cannot", averaging="drifts", averaging_each_step="alike")
def lbfgs_line_search():
    """A line search goes by the loss of the whole batch, which workers share unevenly."""
    model = Net().double()  # in single precision rounding alone turns a line search
    search = {"max_iter": 4, "line_search_fn": "strong_wolfe"}
    model, optimizer = distributed(model, torch.optim.LBFGS, lr=0.5, **search)
    for x, y in batches(3, batch=7):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.double()), y.double())  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@script()
def one_cycle():
    """A schedule that turns learning rate and momentum, of Adam."""
    model, optimizer = distributed(Net(), torch.optim.AdamW, lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10)
    for x, y in batches():
        take_step(model, optimizer, x, y)
        scheduler.step()
    return model


@script(averages=True)
def plateau():
    """The learning rate falls when the mean loss over the workers does not."""
    model, optimizer = distributed(Net(), torch.optim.SGD, lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(paceline.mean(loss.item()))
    rate = optimizer.param_groups[0]["lr"]
    return model, {"rate": [rate]}


@script(averages=True)
def scheduler_first():
    """The scheduler is made before distribute."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer = paceline.distribute(model, optimizer)
    for x, y in batches():
        take_step(model, optimizer, x, y)
        scheduler.step()
    return model


@script(averages=True)
def rate_by_hand():
    """The learning rate is set by hand before each step."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        take_step(model, optimizer, x, y)
    return model


@script(averages=True)
def rate_before_step():
    """The learning rate is set by hand between backward and step."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        backward(model, optimizer, x, y)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (2 + step)
        optimizer.step()
    return model


@script(modes="refused: looks at optimizer.state")
def clears_state():
    """The optimizer forgets in the middle."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    for step, (x, y) in enumerate(batches()):
        if step == 5:
            optimizer.state.clear()
        take_step(model, optimizer, x, y)
    return model


@script(modes="refused: looks at optimizer.state")
def reads_state():
    """The optimizer's state is looked at after every step."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    momenta = []
    for x, y in batches():
        take_step(model, optimizer, x, y)
        momenta.append(optimizer.state[model.last.weight]["exp_avg"].sum())
    return model, {"momenta": momenta}


@script(modes="refused: looks at optimizer.state")
def replaces_state():
    """The optimizer's state is replaced by an empty one in the middle."""
    model, optimizer = distributed(Net(), torch.optim.Adam, lr=0.01)
    for step, (x, y) in enumerate(batches()):
        if step == 5:
            optimizer.state = defaultdict(dict)
        take_step(model, optimizer, x, y)
    return model
