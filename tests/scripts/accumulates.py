"""Two batches make one step, without no_sync."""

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
for number, (x, y) in enumerate(paceline.shard(loader(16), batch="global")):
    loss = F.mse_loss(model(x), y) / 2
    loss.backward()
    if number % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
result = {"weights": numbers(model)}
