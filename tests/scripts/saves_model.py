"""The whole model is saved and loaded on the way."""

import io

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
saved = io.BytesIO()
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step == 5:
        torch.save(model, saved)
saved.seek(0)
loaded = torch.load(saved, weights_only=False)
result = {
    "weights": numbers(model),
    "loaded": numbers(loaded),
    "kind": [float(type(loaded) is Net)],
}
