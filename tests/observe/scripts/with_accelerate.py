"""A job on Accelerate, with accumulation, that knows nothing of Paceline."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(640, 32)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for inputs, labels in loader:
    with accelerator.accumulate(net):
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
