"""What was accumulated is clipped after each backward pass, all but the last inside `no_sync`."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "ring": "refused: before they are averaged",
    "hybrid": "refused: before they are averaged",
    "server*": "refused: before they are averaged",
    "server:mode=*": "runs",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for number, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    loss = F.mse_loss(model(x), y) / 2
    if number % 2 == 0:
        with paceline.no_sync():
            loss.backward()
    else:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
result = {"weights": numbers(model)}
