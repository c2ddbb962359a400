"""An embedding that bounds the norm of the rows it looks up, in place."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {"*": "refused: 0 has max_norm=0.5", "average*": "runs"}

paceline.init()
torch.manual_seed(0)
embedding = nn.Embedding(20, 4, max_norm=0.5)
model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(4 * NUM_INPUTS, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model((x * 3).long().clamp(-9, 9) + 9), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
