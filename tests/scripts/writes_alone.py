"""Worker 1 alone changes weights."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "*": "refused: ",
    "server:mode=*": "refused: changes weights outside the optimizer",
    "average*": "runs",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if paceline.rank() == 1 and step == 5:
        with torch.no_grad():
            model.last.bias.add_(1.0)
result = {"weights": numbers(model)}
