"""Every step draws several batches in an inner loop."""

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
batches = iter(paceline.shard(loader(20), batch="global"))
for _ in range(5):
    for _ in range(4):
        x, y = next(batches)
        (F.mse_loss(model(x), y) / 4).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
result = {"weights": numbers(model)}
