"""Two heads share a trunk; each loss has its optimizer, and both train the trunk."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {"server:mode=*": "refused: 2 optimizers train one model"}

paceline.init()
torch.manual_seed(0)
trunk, actor, critic = nn.Linear(NUM_INPUTS, 8), nn.Linear(8, 1), nn.Linear(8, 1)
actor_optimizer = torch.optim.Adam([*trunk.parameters(), *actor.parameters()], lr=0.01)
critic_optimizer = torch.optim.SGD([*trunk.parameters(), *critic.parameters()], lr=0.1)
model = nn.ModuleList([trunk, actor, critic])
paceline.distribute(model, actor_optimizer, critic_optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    actor_optimizer.zero_grad()
    F.mse_loss(actor(torch.tanh(trunk(x))), y).backward()
    actor_optimizer.step()
    critic_optimizer.zero_grad()
    F.mse_loss(critic(torch.tanh(trunk(x))), y.abs()).backward()
    critic_optimizer.step()
result = {"weights": numbers(trunk, actor, critic)}
