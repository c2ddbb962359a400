"""A line search goes by the loss of the whole batch, which workers share unevenly."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: LBFGS cannot"}

paceline.init()
torch.manual_seed(0)
model = Net().double()  # in single precision rounding alone turns a line search
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(3, batch=7), batch="global"):

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.double()), y.double())  # noqa: B023
        loss.backward()
        return loss

    optimizer.step(closure)
result = {"weights": numbers(model)}
