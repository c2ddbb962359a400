"""Groups with settings of their own, one of them turned in the middle."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

paceline.init()
torch.manual_seed(0)
model = Net()
decayed = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.03}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step == 5:
        optimizer.param_groups[1]["weight_decay"] = 0.3
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
