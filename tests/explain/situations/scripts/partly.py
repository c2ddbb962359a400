"""A user's script with something wrong for a part of the run, or with what it learns from.

`partly.py straggler-for-a-while`. Computing is sleeping, so that what is planted does not depend on
this machine's cores; no loss is reported.
"""

import random
import sys
import time

import torch
from torch import nn
from torch.nn import functional

import paceline

PLANTED = sys.argv[1]
STEPS = 80
COMPUTE_SECONDS = 0.04
TRUTH = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))


class Samples(torch.utils.data.Dataset):
    def __init__(self, rank):
        self._rank, self._read = rank, 0

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        self._read += 1
        if PLANTED == "cold-disk" and self._read < 0.5 * STEPS * 16:
            time.sleep(0.004)
        if PLANTED == "decoding":
            random.seed(index)
            sum(random.random() for _ in range(60_000))
        inputs = torch.randn(32, generator=torch.Generator().manual_seed(index))
        target = int((inputs @ TRUTH).argmax())
        if PLANTED == "other-scale-on-one" and self._rank == 1:
            inputs = inputs * 60
        return inputs, target


class Device(nn.Module):
    """Takes the time of a device; how long depends on what is planted."""

    def __init__(self, rank):
        super().__init__()
        self._rank, self._passes = rank, 0

    def forward(self, inputs):
        seconds, share = COMPUTE_SECONDS, self._passes / STEPS
        if PLANTED == "straggler-for-a-while" and self._rank == 1 and 0.35 <= share < 0.75:
            seconds *= 3
        if PLANTED == "straggler-at-first" and self._rank == 1 and share < 0.5:
            seconds *= 2.5
        if PLANTED == "steps-grow":
            seconds *= 1 + 2.5 * share
        self._passes += 1
        time.sleep(0.0 if PLANTED == "decoding" else seconds)
        return inputs


def loader_of(rank):
    if PLANTED == "same-samples":  # a seed that all workers share, and no shard
        order = torch.Generator().manual_seed(1)
        return torch.utils.data.DataLoader(Samples(rank), 16, shuffle=True, generator=order)
    processes = 4 if PLANTED == "decoding" else 0
    loader = torch.utils.data.DataLoader(Samples(rank), 16, shuffle=True, num_workers=processes)
    return paceline.shard(loader)


def main():
    session = paceline.init()
    torch.manual_seed(0)
    width = 4096 if PLANTED == "decoding" else 64
    layers = [nn.Linear(32, width), nn.ReLU(), Device(session.rank), nn.Linear(width, 4)]
    model = nn.Sequential(*layers)
    rate = 1e-9 if PLANTED == "rate-of-nothing" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer = paceline.distribute(model, optimizer)
    for step, (inputs, targets) in enumerate(loader_of(session.rank)):
        if PLANTED == "rate-jumps" and step == 50:
            optimizer.param_groups[0]["lr"] = 200.0
        optimizer.zero_grad()
        outputs = model(inputs)
        if PLANTED == "one-divides-by-zero" and session.rank == 1 and step == 40:
            outputs = outputs / (outputs - outputs)
        functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
        if PLANTED == "one-evaluates" and session.rank == 0 and step % 10 == 9:
            evaluate(model, inputs)
        if step + 1 == STEPS:
            break


def evaluate(model, inputs):
    model.eval()
    with torch.no_grad():
        for _ in range(12):
            model(inputs)
    model.train()


main()
