"""A frozen teacher shows a student the way."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
teacher = Net().eval().requires_grad_(False)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
losses = []
for x, _ in paceline.shard(loader(), batch="global"):
    with torch.no_grad():
        shown = teacher(x)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), shown)
    loss.backward()
    optimizer.step()
    losses.append(paceline.mean(loss))
result = {"weights": numbers(model), "losses": numbers(losses)}
