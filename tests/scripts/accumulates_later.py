"""Accumulation begins in the middle."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server*": "refused: Write server:update=worker",
    "server:mode=*": "refused: Use them in the first step too",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
pending = 0
for number, (x, y) in enumerate(paceline.shard(loader(16), batch="global")):
    F.mse_loss(model(x), y).backward()
    pending += 1
    if number < 6 or pending == 2:
        optimizer.step()
        optimizer.zero_grad()
        pending = 0
result = {"weights": numbers(model)}
