"""The optimizer trains a parameter that is in no module."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
temperature = nn.Parameter(torch.tensor([0.3]))
optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.05, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x) * temperature.exp(), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model), "temperature": numbers(temperature)}
