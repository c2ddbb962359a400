"""Gradients lie in one buffer of the script's, which it clears and scales as a whole."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
weights = list(model.parameters())
flat = torch.zeros(sum(weight.numel() for weight in weights))
for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
    weight.grad = part.view_as(weight)
for x, y in paceline.shard(loader(), batch="global"):
    flat.zero_()
    F.mse_loss(model(x), y).backward()
    flat.mul_(0.5)
    optimizer.step()
result = {"weights": numbers(model)}
