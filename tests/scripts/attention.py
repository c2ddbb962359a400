"""A transformer layer, with torch's fast paths in evaluation."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import loader, numbers

EXPECTED = {"average:every=1": "equal"}

paceline.init()
torch.manual_seed(0)
model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
losses = []
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x[:, :, None].expand(-1, -1, 8))[:, 0, :1], y).backward()
    optimizer.step()
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            output = model(x[:, :, None].expand(-1, -1, 8))[:, 0, :1]
        losses.append(paceline.mean(F.mse_loss(output, y)))
        model.train()
result = {"weights": numbers(model), "losses": numbers(losses)}
