"""The optimizer's step is compiled, as torch's own tutorial has it."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "runs"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
batches = paceline.shard(loader(batch=17), batch="global")


@torch.compile(backend="eager")
def step():
    optimizer.step()


for _ in range(2):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        step()
result = {"weights": numbers(model)}
