"""Each worker lowers its rate by its own loss."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "ring": "refused: weights have become different",
    "hybrid": "refused: weights have become different",
    "server*": "refused: has set its optimizer otherwise than the others",
    "server:mode=async": "runs",
    "server:mode=quorum*": "runs",
    "average*": "runs",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step > 2:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + paceline.rank())
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
