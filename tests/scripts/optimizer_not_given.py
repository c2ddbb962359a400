"""A learned scale has an optimizer of its own that Paceline was not given."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"*": "refused: an optimizer that it was not given"}

paceline.init()
torch.manual_seed(0)
model, scale = Net(), torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
other = torch.optim.SGD([scale], lr=0.05)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    other.zero_grad()
    F.mse_loss(scale * model(x), y).backward()
    optimizer.step()
    other.step()
result = {"weights": numbers(model, scale)}
