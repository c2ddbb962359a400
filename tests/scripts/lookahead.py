"""Slow weights follow the fast ones every fifth step, and pull them back."""

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
slow = [parameter.detach().clone() for parameter in model.parameters()]
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        with torch.no_grad():
            for kept, parameter in zip(slow, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.5)
                parameter.copy_(kept)
result = {"weights": numbers(model)}
