"""A GradScaler, unscaled for clipping, with one overflow on the way."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y) * (float("inf") if step == 5 else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)
    scaler.update()
result = {"weights": numbers(model), "scale": [scaler.get_scale()]}
