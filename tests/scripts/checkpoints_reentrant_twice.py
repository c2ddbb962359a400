"""Two checkpoints share a layer: its gradient is made in two passes inside one."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    x.requires_grad_(True)
    optimizer.zero_grad()
    parts = [checkpoint(model.encode, x * scale, use_reentrant=True) for scale in (1.0, 0.5)]
    F.mse_loss(model.last(sum(parts)), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
