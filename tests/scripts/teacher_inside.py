"""The frozen teacher is part of the model, and follows it as an average."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


paceline.init()
torch.manual_seed(0)
model = Pair()
optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model.student(x), y) + F.mse_loss(model.student(x), model.teacher(x))
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
        for mean, parameter in pairs:
            mean.lerp_(parameter, 0.1)
result = {"weights": numbers(model)}
