"""Evaluation every third step; all workers see one model."""

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
test = loader(2)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    model.train()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step % 3 == 2:
        model.eval()
        with torch.no_grad():
            losses += [F.mse_loss(model(x), y) for x, y in test]
model.eval()  # whoever looks at the model as a whole sees one
result = {"weights": numbers(model), "losses": numbers(losses)}
