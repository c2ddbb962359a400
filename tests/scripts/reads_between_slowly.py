"""Weights are read some time after backward, before the step."""

import time

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server*": "refused: read between backward and optimizer.step()",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
norms = []
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if step == 4:
        time.sleep(0.3)
        norms.append(sum(parameter.norm() for parameter in model.parameters()))
    optimizer.step()
result = {"weights": numbers(model), "norms": numbers(norms)}
