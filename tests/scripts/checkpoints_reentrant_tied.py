"""A layer is used outside a reentrant checkpoint, then inside of one."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "*": "refused: write checkpoint(..., use_reentrant=False)",
    "average:every=1": "equal",
    "average*": "runs",
    "server:mode=*": "refused: write checkpoint(..., use_reentrant=False)",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    x.requires_grad_(True)
    optimizer.zero_grad()
    inside = checkpoint(model.encode, x, use_reentrant=True)
    outputs = model.last(inside + model.encode(x * 0.5))
    F.mse_loss(outputs, y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
