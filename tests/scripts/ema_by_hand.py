"""An average of the weights, kept by hand."""

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
average = [parameter.detach().clone() for parameter in model.parameters()]
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.mul_(0.9).add_(parameter, alpha=0.1)
result = {"weights": numbers(model), "average": numbers(average)}
