"""The only parameter has no elements."""

import torch
from torch import nn

import paceline
from tests.scripts.toy import loader, numbers

EXPECTED = {"average:every=1": "equal"}


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean() + self.nothing.sum()


paceline.init()
model = Empty()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for x, _ in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
result = {"weights": numbers(model)}
