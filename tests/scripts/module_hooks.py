"""Hooks on modules look at outputs and change gradients."""

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
seen = []
model.first.register_forward_hook(lambda module, _, output: seen.append(module.weight.norm()))
model.last.register_full_backward_pre_hook(lambda _, gradients: tuple(g * 0.5 for g in gradients))
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
result["seen"] = numbers(*seen)
