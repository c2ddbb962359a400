"""A frozen layer is trained from the fifth step on, whose batch of 7 nobody can share evenly."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"average:every=1": "equal", "server:mode=*": "refused: trains other tensors"}

paceline.init()
torch.manual_seed(0)
model = Net()
model.first.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
data = loader().dataset
batches = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(71)), batch_size=16)
batches = paceline.shard(batches, batch="global")
for step, (x, y) in enumerate(batch for _ in range(2) for batch in batches):
    if step == 4:
        model.first.requires_grad_(True)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
