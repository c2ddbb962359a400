"""The same penalty with the inner derivative by torch.autograd.grad."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"ring": "runs", "hybrid": "runs", "server*": "runs", "average*": "runs"}
"""Not linear in the samples: a mean of the workers' penalties is not the whole batch's."""

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 0.1 * sum((g**2).sum() for g in inner)).backward()
    optimizer.step()
result = {"weights": numbers(model)}
