"""An optimizer with a step of its own."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: SignDescent cannot"}


class SignDescent(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = SignDescent(model.parameters(), lr=0.01)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
result = {"weights": numbers(model)}
