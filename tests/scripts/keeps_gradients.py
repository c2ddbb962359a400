"""Holds on to the gradients of the step before, and uses them beside the new ones."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
before = [torch.zeros_like(parameter) for parameter in model.parameters()]
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    made = [parameter.grad for parameter in model.parameters()]
    for parameter, old in zip(model.parameters(), before, strict=True):
        parameter.grad = parameter.grad + 0.5 * old
    optimizer.step()
    before = made
result = {"weights": numbers(model)}
