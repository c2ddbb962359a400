"""The optimizer's state is looked at after every step."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "server:mode=*": "refused: looks at optimizer.state",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
momenta = []
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    momenta.append(optimizer.state[model.last.weight]["exp_avg"].sum())
result = {"weights": numbers(model), "momenta": numbers(momenta)}
