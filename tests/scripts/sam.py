"""Sharpness-aware: a step to where the loss is worse, and back again with its gradients."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: changes weights outside the optimizer"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        moves = [0.05 * parameter.grad for parameter in model.parameters()]
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.add_(move)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
result = {"weights": numbers(model)}
