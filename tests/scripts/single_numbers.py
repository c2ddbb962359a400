"""Parameters of one element, alone in a model or several, with every element-wise optimizer whose
state is saved and loaded on the way."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import loader, numbers

OPTIMIZERS = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop),
]
SETTINGS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5}, "Adam": {"amsgrad": True}}
SHAPES = [[(), (1,), ()], [()]]


class Scales(nn.Module):
    """A sum of the inputs, times each parameter."""

    def __init__(self, shapes):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.full(s, 0.5)) for s in shapes])

    def forward(self, inputs):
        for number, scale in enumerate(self.scales):
            inputs = inputs * scale + number
        return inputs.sum(1, keepdim=True)


paceline.init()
result = {}
for number, make in enumerate(OPTIMIZERS):
    model = Scales(SHAPES[number % 2])
    settings = SETTINGS.get(make.__name__, {})
    optimizer = make(model.parameters(), lr=0.01, **settings)
    model, optimizer = paceline.distribute(model, optimizer)
    for step, (x, y) in enumerate(paceline.shard(loader(6), batch="global")):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()["state"]
    result[make.__name__] = numbers(model)
    result[f"{make.__name__} state"] = [
        value
        for state in saved.values()
        for name in sorted(state)
        for value in ([float(state[name].ndim), *numbers(state[name])])
    ]
