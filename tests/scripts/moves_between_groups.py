"""A parameter moves from one group of the optimizer to another."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: mode=sync"}

paceline.init()
torch.manual_seed(0)
model = Net()
groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters())}]
groups[1]["lr"] = 0.001
optimizer = torch.optim.AdamW(groups, lr=0.02)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step == 5:
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[1]["params"].append(moved)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
