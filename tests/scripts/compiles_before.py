"""torch.compile gives another module, which is distributed."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
plain = Net()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
model = torch.compile(plain, backend="aot_eager")
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
