"""A schedule that turns learning rate and momentum, of Adam."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
model, optimizer = paceline.distribute(model, optimizer)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
result = {"weights": numbers(model)}
