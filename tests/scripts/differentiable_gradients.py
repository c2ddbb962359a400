"""A penalty on gradients that backward leaves differentiable: cannot cross an exchange."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average*": "runs", "*": "refused: torch.autograd.grad"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward(create_graph=True)
    sum((p.grad**2).sum() for p in model.parameters()).backward()
    optimizer.step()
result = {"weights": numbers(model)}
