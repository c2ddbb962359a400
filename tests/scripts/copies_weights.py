"""Weights are copied in after each step."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server:mode=*": "refused: changes weights outside the optimizer",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.last.weight.copy_(model.last.weight / (1 + model.last.weight.norm()))
result = {"weights": numbers(model)}
