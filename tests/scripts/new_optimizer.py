"""Another optimizer takes over in the middle, without Paceline being told."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "server*": "refused: an optimizer that distribute was not given takes the step",
    "server:mode=*": "refused: steps another optimizer",
    "average*": "refused: an optimizer that distribute was not given",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step == 5:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
