"""Two models in one ModuleList, distributed together with both optimizers."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.toy import NUM_INPUTS, loader, numbers

EXPECTED = {"server:mode=*": "refused: 2 optimizers train one model"}


paceline.init()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, NUM_INPUTS))
critic = nn.Sequential(nn.Linear(NUM_INPUTS, 8), nn.Tanh(), nn.Linear(8, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
both = nn.ModuleList([generator, critic])
paceline.distribute(both, generator_optimizer, critic_optimizer)
losses = []
for x, _ in paceline.shard(loader(), batch="global"):
    noise = x[:, :3]
    fake = generator(noise)
    critic_optimizer.zero_grad()
    real_loss = F.softplus(-critic(x)).mean()
    real_loss.backward()
    fake_loss = F.softplus(critic(fake.detach())).mean()
    fake_loss.backward()
    critic_optimizer.step()
    generator_optimizer.zero_grad()
    loss = F.softplus(-critic(fake)).mean()
    loss.backward()
    generator_optimizer.step()
    losses.append(paceline.mean(loss))
result = {"weights": numbers(generator, critic), "losses": numbers(losses)}
