"""A layer is left out in some steps, and Adam counts its steps without them."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x) if step % 3 else model.encode(x).sum(1, keepdim=True), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
