"""The last batch is smaller than the others, and some workers have less of it."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
samples = Subset(loader().dataset, range(37))
batches = paceline.shard(DataLoader(samples, batch_size=16), batch="global")
for _ in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
result = {"weights": numbers(model), "batches": [float(len(batches))]}
