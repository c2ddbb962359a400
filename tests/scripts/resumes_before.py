"""Model and optimizer take up a checkpoint before distribute."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
earlier = Net()
optimizer = torch.optim.Adam(earlier.parameters(), lr=0.01)
for x, y in loader(3):
    optimizer.zero_grad()
    F.mse_loss(earlier(x), y).backward()
    optimizer.step()
model = Net()
model.load_state_dict(earlier.state_dict())
state = optimizer.state_dict()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer.load_state_dict(state)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
