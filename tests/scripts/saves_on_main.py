"""Worker 0 alone saves, after all have settled."""

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
norms = []
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        paceline.settle()
        if paceline.is_main():
            saved = model.state_dict()
            norms += [float(value.norm()) for value in saved.values()]
            optimizer.state_dict()
result = {"weights": numbers(model), "norms": norms if paceline.is_main() else []}
