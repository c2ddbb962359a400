"""An optimizer that differs from torch's in its defaults only."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers


class Careful(torch.optim.AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99))


paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = Careful(model.parameters())
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
