"""Worker 1 alone skips a step."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "*": "refused: worker1 ended after 9 steps",
    "server:mode=*": "runs",
    "average*": "refused: every worker must take the same number of steps",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if paceline.rank() == 1 and step == 5:
        continue
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
