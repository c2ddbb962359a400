"""In some steps nothing is trained at all."""

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
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    model.requires_grad_(step % 4 != 3)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    if loss.requires_grad:
        loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
