"""Two models that share a trunk are distributed one after the other."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server:mode=*": "refused: changes weights outside the optimizer",
}

paceline.init()
torch.manual_seed(0)
trunk = nn.Linear(NUM_INPUTS, 8)
actor = nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 1))
critic = nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 1))
actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
paceline.distribute(actor, actor_optimizer)
paceline.distribute(critic, critic_optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    actor_optimizer.zero_grad()
    F.mse_loss(actor(x), y).backward()
    actor_optimizer.step()
    critic_optimizer.zero_grad()
    F.mse_loss(critic(x), y.abs()).backward()
    critic_optimizer.step()
result = {"weights": numbers(actor, critic)}
