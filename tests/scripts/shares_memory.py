"""Weights lie in memory that another process reads, as an actor does beside a learner."""

import os
from multiprocessing import Pipe

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server*mode=*": "refused: weights lie in an array or in shared memory"}

torch.manual_seed(0)
model = Net().share_memory()
pipe, theirs = Pipe()
if os.fork() == 0:
    pipe.close()
    weights = [weight.detach() for weight in model.parameters()]
    try:
        while theirs.recv():
            theirs.send([float(weight.sum()) for weight in weights])
    finally:
        os._exit(0)
paceline.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
seen = []
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    pipe.send(True)
    seen += pipe.recv()
pipe.send(False)
os.wait()
result = {"seen": seen, "weights": numbers(model)}
