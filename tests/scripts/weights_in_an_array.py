"""A weight lies in an array of numpy's, which the script reads to the end."""

import numpy as np
import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server*mode=*": "refused: weights lie in an array"}

paceline.init()
torch.manual_seed(0)
model = Net()
array = np.linspace(-0.2, 0.2, model.first.weight.numel(), dtype=np.float32).reshape(8, -1)
model.first.weight = torch.nn.Parameter(torch.from_numpy(array))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
sizes = []
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    sizes.append(float(np.abs(array).sum()))
result = {"sizes": sizes, "weights": numbers(model)}
