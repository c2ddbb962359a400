"""Weights are projected every third step."""

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
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 3 == 2:
        with torch.no_grad():
            model.first.weight.div_(model.first.weight.norm(dim=1, keepdim=True))
result = {"weights": numbers(model)}
