"""Accumulation, then clipping by norm."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for number, (x, y) in enumerate(paceline.shard(loader(16), batch="global")):
    loss = F.mse_loss(model(x), y) / 2
    if number % 2 == 0:
        with paceline.no_sync():
            loss.backward()
        continue
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
result = {"weights": numbers(model)}
