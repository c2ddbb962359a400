"""The whole model is saved on the way, loaded by the class it had, and another one made of it."""

import io

import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations

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
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 5:
        torch.save(model, saved)
saved.seek(0)
with torch.serialization.safe_globals([Net, torch.nn.Linear]):
    loaded = torch.load(saved)
another = model.__class__()
parametrizations.weight_norm(another.first)
result = {
    "weights": numbers(model),
    "loaded": numbers(loaded),
    "class": [float(type(loaded) is type(another) is model.__class__ is Net)],
}
