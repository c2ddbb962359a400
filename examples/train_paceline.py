"""The same loop on many workers: `paceline run -n 2 examples/train_paceline.py`."""

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import paceline
from paceline import data, models

paceline.init()
dataset = data.open("shapes")
loader = DataLoader(dataset, batch_size=32, shuffle=True)
torch.manual_seed(0)
model = models.build("tutorial-cnn")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
loader = paceline.shard(loader)

for epoch in range(1):
    for step, (images, labels) in enumerate(loader):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
