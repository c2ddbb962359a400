"""A weight gets other memory by `set_`, of which torch tells nobody."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server:mode=*": "refused: changes weights outside the optimizer",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
kept = []
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 4:
        before = model.last.weight.detach()
        with torch.no_grad():
            model.last.weight.set_(torch.full((1, 8), 0.25))
        kept = [before, model.last.weight.detach()]  # the old memory, and the new one
result = {"weights": numbers(model), "views": numbers(kept)}
