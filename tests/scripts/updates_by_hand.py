"""After some steps gradients come from torch.autograd.grad, and the script updates by itself: each
worker with its own, which no exchange sees."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "*": "refused: weights have become different",
    "server*mode=*": "refused: the script changes weights outside the optimizer",
    "average*": "runs",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step < 3:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        continue
    weights = list(model.parameters())
    gradients = torch.autograd.grad(F.mse_loss(model(x), y), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.1 * gradient
paceline.settle()
result = {"weights": numbers(model)}
