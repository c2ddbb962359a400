"""no_sync surrounds every backward, and gradients are zeroed in place."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad(set_to_none=False)
    with paceline.no_sync():
        F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
