"""Batch norm: workers see different samples, and end with one model."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {"*": "alike", "server:mode=*": "runs", "average:every=4": "alike"}

paceline.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(NUM_INPUTS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
paceline.settle()
result = {"weights": numbers(model), "statistics": numbers(model.buffers())}
