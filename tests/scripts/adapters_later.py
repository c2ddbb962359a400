"""Adapters are put into a frozen model, with an optimizer that Paceline was not told of."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "server:mode=*": "refused: mode=sync",
    "average*": "refused: an optimizer that distribute was not given",
}


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.full((2, layer.in_features), 0.1))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(), batch="global")):
    if step == 4:
        model.requires_grad_(False)
        model.first = Adapted(model.first)
        optimizer = torch.optim.AdamW([model.first.down, model.first.up], lr=0.05)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
result = {"weights": numbers(model)}
