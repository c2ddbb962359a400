"""Every worker evaluates a part; the metric is a mean over the workers."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal", "average*": "alike"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
losses = []
test = paceline.shard(loader(2), batch="global")
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    model.train()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step % 3 == 2:
        model.eval()
        with torch.inference_mode():
            total = sum(F.mse_loss(model(x), y).item() for x, y in test)
        losses.append(paceline.mean(total))
model.eval()
result = {"weights": numbers(model), "losses": numbers(losses)}
