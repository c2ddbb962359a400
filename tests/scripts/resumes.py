"""Model and optimizer are saved in the middle and taken back later."""

import copy

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
saved = None
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 4:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if step == 7:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
result = {"weights": numbers(model)}
