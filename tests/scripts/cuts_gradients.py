"""Gradients that autograd cuts from one of `torch.cat` share memory, which is nobody's business."""

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
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    joined = torch.cat([model.first.weight.flatten(), model.first.bias])
    hidden = torch.tanh(F.linear(x, joined[:48].view(8, 6), joined[48:]))
    F.mse_loss(model.last(hidden), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
