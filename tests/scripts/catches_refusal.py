"""A loop that catches every exception goes on after a refusal, and trains nothing."""

import contextlib

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "*": "refused: registered after distribute",
    "server*mode=async*": "runs",
    "server*mode=bounded*": "runs",
    "server*mode=quorum*": "runs",
    "average*": "runs",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
model.last.weight.register_hook(lambda gradient: gradient * 0.5)
for x, y in paceline.shard(loader(), batch="global"):
    with contextlib.suppress(Exception):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
result = {"weights": numbers(model)}
