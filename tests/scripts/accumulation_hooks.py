"""Hooks that run once a gradient is there clip it; one is registered after distribute."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers


def clip(parameter):
    parameter.grad.clamp_(-0.05, 0.05)


paceline.init()
torch.manual_seed(0)
model = Net()
model.first.weight.register_post_accumulate_grad_hook(clip)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
model.last.weight.register_post_accumulate_grad_hook(clip)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
