"""Gradients are made by torch.func.grad and set by hand."""

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)


def loss_of(weights, x, y):
    return F.mse_loss(functional_call(model, weights, (x,)), y)


for x, y in paceline.shard(loader(), batch="global"):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = grad(loss_of)(weights, x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()
result = {"weights": numbers(model)}
