"""The optimizer trains a tensor that is no parameter, different on each worker at first."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import NUM_INPUTS, Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
shift = torch.full((NUM_INPUTS,), float(paceline.rank()), requires_grad=True)
optimizer = torch.optim.SGD([*model.parameters(), shift], lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x + shift), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model), "shift": numbers(shift)}
