"""A script of one's own with Paceline's three lines: ResNet-50 on a GPU, without recorded passes.

Run by `benchmarks/gpu.py`, part `script`; alone by `paceline run -n 1 benchmarks/gpu_script.py`.
"""

import sys

import torch
from torch.nn import functional

import paceline
from paceline import models


def main() -> None:
    steps, batch = (int(argument) for argument in sys.argv[1:3])
    paceline.init()
    device = torch.device("cuda")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = models.build("resnet50", input_shape=(3, 224, 224), num_classes=1000)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    model, optimizer = paceline.distribute(model, optimizer)
    inputs = torch.randn(batch, 3, 224, 224, device=device)
    inputs = inputs.to(memory_format=torch.channels_last)
    targets = torch.randint(1000, (batch,), device=device)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
