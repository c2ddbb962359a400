"""A layer becomes orthogonal in the middle of training: torch sets the weight's memory anew."""

import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server:mode=*": "refused: fix: ",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 4:
        parametrizations.orthogonal(model.first)
result = {"weights": numbers(model), "orthogonal": numbers(model.first.weight)}
