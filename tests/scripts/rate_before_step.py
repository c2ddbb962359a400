"""The learning rate is set by hand between backward and step."""

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
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (2 + step)
    optimizer.step()
result = {"weights": numbers(model)}
