"""A function looks up rows of a weight and bounds their norm in place, as it reads them."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {
    "*": "refused: weights have become different",
    "server*": "refused: embedding changes weights while it reads them",
    "average*": "runs",
}

paceline.init()
torch.manual_seed(0)
embedding = nn.Embedding(20, 4)
head = nn.Linear(4 * NUM_INPUTS, 1)
model = nn.ModuleList([embedding, head])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    rows = F.embedding((x * 3).long().clamp(-9, 9) + 9, embedding.weight, max_norm=0.5)
    F.mse_loss(head(rows.flatten(1)), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
