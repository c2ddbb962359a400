"""A whole step is compiled: forward, backward and update."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "runs"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
batches = paceline.shard(loader(batch=17), batch="global")


@torch.compile(backend="eager")
def step(x, y):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


for _ in range(2):
    for x, y in batches:
        step(x, y)
result = {"weights": numbers(model)}
