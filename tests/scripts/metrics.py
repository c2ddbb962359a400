"""Numbers of all workers, by paceline.mean."""

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
losses, errors = [], torch.zeros(2)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(paceline.mean(loss.item()))
    errors += paceline.mean(torch.stack([loss.detach(), loss.detach().sqrt() * 0 + 1]))
result = {"weights": numbers(model), "losses": losses, "errors": numbers(errors)}
