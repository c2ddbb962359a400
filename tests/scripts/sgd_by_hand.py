"""Some weights are updated by hand, from their gradients."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    model.first.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.first.parameters():
            parameter -= 0.1 * parameter.grad
result = {"weights": numbers(model)}
