"""A step is skipped on all workers after its backward."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server*": "refused: Write server:update=worker",
    "server:mode=*": "refused: Use them in the first step too",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y + 5 * (step in (4, 7)))
    loss.backward()
    if paceline.mean(loss) > 10:
        continue
    optimizer.step()
result = {"weights": numbers(model)}
