"""Stochastic weight averaging with its own schedule, from the middle on."""

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
average = AveragedModel(model)
scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step >= 5:
        average.update_parameters(model)
        scheduler.step()
result = {"weights": numbers(model), "average": numbers(average)}
