"""Copies of the model are taken on the way, and trained on their own."""

import copy

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
copies = []
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step in (0, 6):
        copies.append(copy.deepcopy(model))
with torch.no_grad():
    for parameter in copies[0].parameters():
        parameter.mul_(2)
kind = type(copies[1]) is Net
result = {"weights": numbers(model), "copies": numbers(*copies), "kind": [float(kind)]}
