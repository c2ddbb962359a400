"""Two optimizers train one model together."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: 2 optimizers train one model"}

paceline.init()
torch.manual_seed(0)
model = Net()
slow = torch.optim.SGD(model.first.parameters(), lr=0.05)
fast = torch.optim.Adam(model.last.parameters(), lr=0.01)
model, slow, fast = paceline.distribute(model, slow, fast)
for x, y in paceline.shard(loader(), batch="global"):
    slow.zero_grad()
    fast.zero_grad()
    F.mse_loss(model(x), y).backward()
    slow.step()
    fast.step()
result = {"weights": numbers(model)}
