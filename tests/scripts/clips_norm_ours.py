"""Clipping by global norm with paceline.clip_grad_norm_."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
norms = []
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norms.append(paceline.clip_grad_norm_(0.3, model))
    optimizer.step()
result = {"weights": numbers(model), "norms": numbers(norms)}
