"""An embedding with dense gradients."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(4 * NUM_INPUTS, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model((x * 3).long().clamp(-9, 9) + 9), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
