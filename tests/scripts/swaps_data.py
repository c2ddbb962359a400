"""An average of the weights takes their place for evaluation, by their memory, and back."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: changes weights outside the optimizer"}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
model, optimizer = paceline.distribute(model, optimizer)
average = [p.detach().clone() for p in model.parameters()]


def swap() -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.data, average[number] = average[number], parameter.data


losses = []
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    for mean, parameter in zip(average, model.parameters(), strict=True):
        mean.lerp_(parameter.detach(), 0.1)
    if step % 3 == 2:
        swap()
        with torch.no_grad():
            losses += [float(F.mse_loss(model(x), y)) for x, y in loader(2)]
        swap()
result = {"weights": numbers(model), "average": numbers(average), "losses": losses}
