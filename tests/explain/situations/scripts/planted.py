"""A user's script that goes wrong as it is told: `planted.py slow-input`."""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn import functional

import paceline

PLANTED = sys.argv[1]
STEPS = 45


class Samples(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self._seconds = seconds

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(self._seconds)
        generator = torch.Generator().manual_seed(index)
        return torch.rand(64, generator=generator), index % 2


class Slow(nn.Module):
    """Takes the time of a device without using a core."""

    def forward(self, inputs):
        time.sleep(0.01)
        return inputs


def main():
    session = paceline.init()
    slow = PLANTED == "slow-input" or (PLANTED == "slow-input-of-one" and session.rank == 1)
    model = nn.Sequential(nn.Linear(64, 32), Slow(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = paceline.distribute(model, optimizer)
    loader = torch.utils.data.DataLoader(Samples(0.002 if slow else 0.0), batch_size=8)
    for step, (inputs, targets) in enumerate(paceline.shard(loader)):
        misbehave(step, session.rank, model, inputs)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        paceline.report_loss(loss)
        loss.backward()
        optimizer.step()
        pause(step, model, inputs)
        if step + 1 == STEPS:
            break


def misbehave(step, rank, model, inputs):
    if PLANTED == "crash" and step == 5 and rank == 1:
        raise RuntimeError("planted: this worker crashes")
    if PLANTED == "killed" and step == 5 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if PLANTED == "first-step" and step == 0:
        time.sleep(6)
    if PLANTED == "own-sleep":
        time.sleep(0.05)


def pause(step, model, inputs):
    if PLANTED == "logging" and step % 10 == 9:
        time.sleep(0.5)
    if PLANTED == "evaluation" and step % 5 == 4:
        model.eval()
        with torch.no_grad():
            for _ in range(20):
                model(inputs)
        model.train()


main()
