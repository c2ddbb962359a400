"""LBFGS asks for the loss and its gradients several times in a step."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: LBFGS cannot"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(6, batch=32), batch="global"):

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)  # noqa: B023
        loss.backward()
        return loss

    optimizer.step(closure)
result = {"weights": numbers(model)}
