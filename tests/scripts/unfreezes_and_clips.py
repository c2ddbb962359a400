"""A layer is unfrozen after four steps; every step is clipped by its norm."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "runs", "server:mode=*": "refused: trains other tensors"}

paceline.init()
torch.manual_seed(0)
model = Net()
model.first.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step == 4:
        model.first.requires_grad_(True)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
result = {"weights": numbers(model)}
