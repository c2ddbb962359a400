"""Every element-wise optimizer of torch, each with a scheduler."""

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler as schedule

import paceline
from tests.scripts.toy import Net, loader, numbers

OPTIMIZERS = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop),
]
SCHEDULERS = [
    lambda optimizer: schedule.StepLR(optimizer, 2, 0.5),
    lambda optimizer: schedule.CosineAnnealingLR(optimizer, 6),
    lambda optimizer: schedule.ExponentialLR(optimizer, 0.8),
    lambda optimizer: schedule.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
]

paceline.init()
result = {}
for number, make in enumerate(OPTIMIZERS):
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters(), lr=0.01)
    model, optimizer = paceline.distribute(model, optimizer)
    scheduler = SCHEDULERS[number % len(SCHEDULERS)](optimizer)
    for x, y in paceline.shard(loader(6), batch="global"):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    result[make.__name__] = numbers(model)
