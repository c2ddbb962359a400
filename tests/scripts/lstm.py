"""A recurrent layer, whose weights torch keeps in a list of its own."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = nn.ModuleList([nn.LSTM(1, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    states, _ = model[0](x[:, :, None])
    F.mse_loss(model[1](states[:, -1]), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
