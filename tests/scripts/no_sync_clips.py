"""Every backward pass is inside `no_sync`, and what they made is clipped before the step."""

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
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    with paceline.no_sync():
        F.mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
result = {"weights": numbers(model)}
