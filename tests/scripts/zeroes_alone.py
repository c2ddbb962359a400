"""Worker 1 alone drops its gradients once, at a rate so small that weights hardly differ."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "*": "refused: weights have become different",
    "server*mode=*": "refused: gradients were cleared or replaced",
    "average*": "runs",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer.register_step_pre_hook(lambda *_: None)  # so that servers only average
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if paceline.rank() == 1 and step == 3:
        optimizer.zero_grad()
    optimizer.step()
result = {"weights": numbers(model)}
