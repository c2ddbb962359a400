"""The model computes its own loss in a method."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}


class Learner(Net):
    def training_step(self, x, y):
        return F.mse_loss(self(x), y)


paceline.init()
torch.manual_seed(0)
model = Learner()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    model.training_step(x, y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
