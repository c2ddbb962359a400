"""A layer gets a new weight in the middle, and the optimizer with it."""

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
        kept = model.last.weight
        model.last.weight = nn.Parameter(kept.detach() * 0.5)
        parameters = optimizer.param_groups[0]["params"]
        place = next(i for i, tensor in enumerate(parameters) if tensor is kept)
        parameters[place] = model.last.weight
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
