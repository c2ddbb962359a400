"""Weights are swapped with others, inside and all, and the others are used too; parts of a batch
are uneven, and gradients are clipped."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: changes weights outside the optimizer"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
others = [nn.Parameter(torch.full_like(p, 0.1)) for p in model.parameters()]
sums = []
for step, (x, y) in enumerate(paceline.shard(loader(batch=15), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step in (4, 6):
        optimizer.zero_grad()
        for parameter, other in zip(model.parameters(), others, strict=True):
            torch.utils.swap_tensors(parameter, other)
        sums += [float(other.sum()) for other in others]
result = {"weights": numbers(model), "sums": sums}
