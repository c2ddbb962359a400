"""The norm of an embedding's rows is bounded after each step: the fix for `max_norm`."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {"server:mode=*": "refused: changes weights outside the optimizer"}

paceline.init()
torch.manual_seed(0)
embedding = nn.Embedding(20, 4)
model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(4 * NUM_INPUTS, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model((x * 3).long().clamp(-9, 9) + 9), y).backward()
    optimizer.step()
    with torch.no_grad():
        embedding.weight.renorm_(2.0, 0, 0.5)
result = {"weights": numbers(model)}
