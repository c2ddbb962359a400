"""Frozen at first; unfrozen and added to Adam later."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: trains other tensors"}

paceline.init()
torch.manual_seed(0)
model = Net()
model.first.requires_grad_(False)
optimizer = torch.optim.Adam(model.last.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step == 4:
        model.first.requires_grad_(True)
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 0.002})
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
