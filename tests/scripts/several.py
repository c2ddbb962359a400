"""Scripts that train several models, or one with several optimizers."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.scripts.harness import NUM_INPUTS, Net, batches, distributed, script, take_step


def generator_and_critic():
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, NUM_INPUTS))
    critic = nn.Sequential(nn.Linear(NUM_INPUTS, 8), nn.Tanh(), nn.Linear(8, 1))
    return generator, critic


def compete(generator, critic, generator_optimizer, critic_optimizer):
    """Train both; the critic steps between the two backward passes of a batch."""
    losses = []
    for x, _ in batches():
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
    return [generator, critic], {"losses": losses}


@script()
def gan():
    """Two models, each with its optimizer; one of them steps between two backward passes."""
    generator, critic = generator_and_critic()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    generator, generator_optimizer = paceline.distribute(generator, generator_optimizer)
    critic, critic_optimizer = paceline.distribute(critic, critic_optimizer)
    return compete(generator, critic, generator_optimizer, critic_optimizer)


@script(averages=True)
def gan_sgd():
    """Two models trained by SGD."""
    generator, critic = generator_and_critic()
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    generator, generator_optimizer = paceline.distribute(generator, generator_optimizer)
    critic, critic_optimizer = paceline.distribute(critic, critic_optimizer)
    return compete(generator, critic, generator_optimizer, critic_optimizer)


@script(modes="refused: 2 optimizers train one model")
def gan_module_list():
    """Two models in one ModuleList, distributed together with both optimizers."""
    generator, critic = generator_and_critic()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    both = nn.ModuleList([generator, critic])
    paceline.distribute(both, generator_optimizer, critic_optimizer)
    return compete(generator, critic, generator_optimizer, critic_optimizer)


@script(modes="refused: 2 optimizers train one model")
def actor_critic():
    """Two heads share a trunk; each loss has its optimizer, and both train the trunk."""
    trunk, actor, critic = nn.Linear(NUM_INPUTS, 8), nn.Linear(8, 1), nn.Linear(8, 1)
    actor_optimizer = torch.optim.Adam([*trunk.parameters(), *actor.parameters()], lr=0.01)
    critic_optimizer = torch.optim.SGD([*trunk.parameters(), *critic.parameters()], lr=0.1)
    model = nn.ModuleList([trunk, actor, critic])
    paceline.distribute(model, actor_optimizer, critic_optimizer)
    for x, y in batches():
        actor_optimizer.zero_grad()
        F.mse_loss(actor(torch.tanh(trunk(x))), y).backward()
        actor_optimizer.step()
        critic_optimizer.zero_grad()
        F.mse_loss(critic(torch.tanh(trunk(x))), y.abs()).backward()
        critic_optimizer.step()
    return [trunk, actor, critic]


@script(averages=True, modes="refused: holds views of its weights")
def shared_trunk_twice():
    """Two models that share a trunk are distributed one after the other."""
    trunk = nn.Linear(NUM_INPUTS, 8)
    actor = nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 1))
    critic = nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 1))
    actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    paceline.distribute(actor, actor_optimizer)
    paceline.distribute(critic, critic_optimizer)
    for x, y in batches():
        actor_optimizer.zero_grad()
        F.mse_loss(actor(x), y).backward()
        actor_optimizer.step()
        critic_optimizer.zero_grad()
        F.mse_loss(critic(x), y.abs()).backward()
        critic_optimizer.step()
    return [actor, critic]


@script(modes="refused: 2 optimizers train one model")
def two_optimizers():
    """Two optimizers train one model together."""
    model = Net()
    slow = torch.optim.SGD(model.first.parameters(), lr=0.05)
    fast = torch.optim.Adam(model.last.parameters(), lr=0.01)
    model, slow, fast = paceline.distribute(model, slow, fast)
    for x, y in batches():
        slow.zero_grad()
        fast.zero_grad()
        F.mse_loss(model(x), y).backward()
        slow.step()
        fast.step()
    return model


@script(averages=True, modes="refused: 4 optimizers train one model")
def optimizer_in_backward():
    """Every parameter has an optimizer, which steps inside backward."""

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    model = Net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    model, *_ = paceline.distribute(model, *optimizers.values())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for x, y in batches():
        F.mse_loss(model(x), y).backward()
    return model


@script(everywhere="refused: an optimizer that it was not given")
def optimizer_not_given():
    """A learned scale has an optimizer of its own that distribute was not given."""
    model, scale = Net(), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    other = torch.optim.SGD([scale], lr=0.05)
    model, optimizer = paceline.distribute(model, optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        other.zero_grad()
        F.mse_loss(scale * model(x), y).backward()
        optimizer.step()
        other.step()
    return [model, scale]


@script(
    updating="refused: steps another optimizer",
    modes="refused: steps another optimizer",
    averaging="refused: an optimizer that distribute was not given",
)
def new_optimizer():
    """Another optimizer takes over in the middle, which distribute was not given."""
    model, optimizer = distributed()
    for step, (x, y) in enumerate(batches()):
        if step == 5:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        take_step(model, optimizer, x, y)
    return model
