"""The learning rate falls when the mean loss over the workers does not."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer = paceline.distribute(model, optimizer)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step(paceline.mean(loss.item()))
rate = optimizer.param_groups[0]["lr"]
result = {"weights": numbers(model), "rate": [rate]}
