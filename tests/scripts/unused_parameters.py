"""Some parameters never get a gradient."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(torch.tanh(model.first(x)).sum(1, keepdim=True), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
