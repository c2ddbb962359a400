"""Each sample goes to one of two experts; a worker may have none for one of them."""

import torch
from torch import nn

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = nn.ModuleList([Net(), Net()])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(batch=8), batch="global"):
    optimizer.zero_grad()
    loss = torch.zeros(())
    for expert, chosen in ((model[0], x[:, 0] > 0.7), (model[1], x[:, 0] <= 0.7)):
        if chosen.any():
            loss = loss + (expert(x[chosen]) - y[chosen]).pow(2).sum() / len(x)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
