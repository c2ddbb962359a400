"""A list of the gradients of the first step is what the script clears in all later ones."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
gradients = []
for x, y in paceline.shard(loader(), batch="global"):
    for gradient in gradients:
        gradient.zero_()
    F.mse_loss(model(x), y).backward()
    gradients = gradients or [weight.grad for weight in model.parameters()]
    optimizer.step()
result = {"weights": numbers(model)}
