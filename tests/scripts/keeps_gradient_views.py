"""Holds on to views of the gradients of the step before."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "hybrid*": "refused: views of gradients of an earlier step",
}

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
    made = [parameter.grad.view(-1) for parameter in model.parameters()]
    for parameter, old in zip(model.parameters(), before, strict=True):
        parameter.grad = parameter.grad + 0.5 * old
    optimizer.step()
    before = [values.view_as(p) for values, p in zip(made, model.parameters(), strict=True)]
result = {"weights": numbers(model)}
