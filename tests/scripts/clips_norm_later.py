"""Clipping begins with the fourth step."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "server*": "refused: gone to the servers already",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if step >= 3:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
result = {"weights": numbers(model)}
