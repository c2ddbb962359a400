"""A layer begins anew after a step: torch's initializers are given weights by name."""

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
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 5:
        torch.manual_seed(step)
        model.last.reset_parameters()
    if step == 7:
        torch.nn.init.orthogonal_(model.first.weight)
result = {"weights": numbers(model)}
