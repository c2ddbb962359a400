"""A hook that clips gradients as they are made is registered after distribute."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "*": "refused: a hook on a trained tensor was registered after distribute",
    "server:mode=*": "runs",
    "average*": "runs",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
