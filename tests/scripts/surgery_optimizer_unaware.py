"""A layer gets a new weight that the optimizer never hears of."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal", "server:mode=*": "refused: trains other tensors"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step == 4:
        model.last.weight = nn.Parameter(model.last.weight.detach() * 0.5)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
