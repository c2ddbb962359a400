"""Keras 3 on its torch backend is a PyTorch model: `paceline run -n 2 examples/keras_on_torch.py`.

The loop of keras.io's "Writing a training loop from scratch in PyTorch".
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from torch.utils.data import DataLoader

import paceline
from paceline import data

paceline.init()
loader = DataLoader(data.open("shapes"), batch_size=32, shuffle=True)
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((3, 32, 32)),
        keras.layers.Conv2D(16, 3, activation="relu", data_format="channels_first"),
        keras.layers.MaxPooling2D(data_format="channels_first"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
loss_of = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
loader = paceline.shard(loader)

for step, (images, labels) in enumerate(loader):
    loss = loss_of(model(images), labels)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        optimizer.step()
    if step % 50 == 0 and paceline.is_main():
        print(f"step {step} loss {loss.item():.4f}")
