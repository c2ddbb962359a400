"""One worker's backward pass breaks off, and it alone skips the batch."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Breaks, Net, loader, numbers

EXPECTED = {"*": "refused: "}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    out = model.last(Breaks.apply(model.encode(x), step == 4 and paceline.rank() == 1))
    try:
        F.mse_loss(out, y).backward()
    except MemoryError:
        continue
    optimizer.step()
result = {"weights": numbers(model)}
