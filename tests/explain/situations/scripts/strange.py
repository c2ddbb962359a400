"""A user's script with something in it that nobody thought of: `strange.py checkpoint-of-one`.

Computing is sleeping, so that what is planted does not depend on this machine's cores.
"""

import os
import random
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional

import paceline

PLANTED = sys.argv[1]
STEPS = {"three-steps": 3, "slows-down": 60, "gc-pauses": 64, "epoch-starts": 64}.get(PLANTED, 45)
COMPUTE_SECONDS = 0.04


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __init__(self):
        self._read = 0

    def __getitem__(self, index):
        if PLANTED == "input-and-pauses":
            time.sleep(0.005)
        if PLANTED == "epoch-starts" and self._read % 80 == 0:  # reading processes start anew
            time.sleep(0.5)
        self._read += 1
        generator = torch.Generator().manual_seed(index)
        return torch.rand(64, generator=generator), index % 2


class Device(nn.Module):
    """Takes the time of a device; how long depends on what is planted."""

    def __init__(self, rank):
        super().__init__()
        self._rank = rank
        self._passes = 0
        self._random = random.Random(rank)

    def forward(self, inputs):
        seconds = COMPUTE_SECONDS
        if PLANTED == "gc-pauses" and self._passes % 9 == 4 + self._rank:
            seconds += 0.3
        if PLANTED == "slows-down" and self._passes >= 30:
            seconds *= 2.5
        if PLANTED == "long-lines":
            seconds = self._random.choice((0.01, 0.02, 0.04, 0.15))
        self._passes += 1
        time.sleep(seconds)
        return inputs


class SlowUpdate(torch.optim.SGD):
    """An optimizer that takes longer than forward and backward."""

    def step(self, closure=None):
        if PLANTED == "heavy-update":
            time.sleep(0.08)
        return super().step(closure)


def main():
    if PLANTED == "long-start":
        time.sleep(25)
    session = paceline.init()
    model = nn.Sequential(nn.Linear(64, 32), Device(session.rank), nn.Linear(32, 2))
    optimizer = SlowUpdate(model.parameters(), lr=0.01)
    model, optimizer = paceline.distribute(model, optimizer)
    loader = paceline.shard(torch.utils.data.DataLoader(Samples(), batch_size=8))
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        paceline.report_loss(loss)
        loss.backward()
        optimizer.step()
        _besides(step, session.rank, model, inputs)
        if step + 1 == STEPS:
            break
    if PLANTED == "long-end":
        time.sleep(25)


def _besides(step, rank, model, inputs):
    if PLANTED == "log-each-step":
        print(f"step {step}", flush=True)
    if PLANTED == "slow-log-of-one" and rank == 1:
        time.sleep(0.03)
    if PLANTED == "checkpoint-of-one" and rank == 0:
        with tempfile.NamedTemporaryFile() as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        time.sleep(0.06)  # a disk slower than this one
    if PLANTED == "input-and-pauses" and step % 10 == 9:
        time.sleep(0.6)
    if PLANTED == "evaluation-in-train-mode" and step % 5 == 4:
        with torch.no_grad():
            for _ in range(8):
                model(inputs)


main()
