"""The model is scripted after it was distributed: compiled code reads weights past Python."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
traced = torch.jit.trace(model, torch.ones(4, 6))
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(traced(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
