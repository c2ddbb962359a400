"""Every parameter has an optimizer, which steps inside backward."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "server:mode=*": "refused: 4 optimizers train one model",
}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


paceline.init()
torch.manual_seed(0)
model = Net()
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
model, *_ = paceline.distribute(model, *optimizers.values())
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for x, y in paceline.shard(loader(), batch="global"):
    F.mse_loss(model(x), y).backward()
result = {"weights": numbers(model)}
