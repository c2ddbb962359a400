"""Evaluation with the averaged weights, which change places with the trained ones."""

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
average = {name: value.clone() for name, value in model.state_dict().items()}
losses = []
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        average[name].lerp_(value, 0.1)
    if step % 4 == 3:
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average)
        with torch.no_grad():
            losses.append(paceline.mean(F.mse_loss(model(x), y)))
        model.load_state_dict(trained)
result = {"weights": numbers(model), "losses": numbers(losses)}
