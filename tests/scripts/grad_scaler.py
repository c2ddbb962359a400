"""A GradScaler scales the loss and looks for infinite gradients."""

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
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
result = {"weights": numbers(model), "scale": [scaler.get_scale()]}
