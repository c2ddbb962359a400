"""A hook that runs once a gradient is there halves it."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}


def halve(parameter):
    parameter.grad.mul_(0.5)


paceline.init()
torch.manual_seed(0)
model = Net()
model.first.weight.register_post_accumulate_grad_hook(halve)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
model.last.weight.register_post_accumulate_grad_hook(halve)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
