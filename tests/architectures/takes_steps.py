"""A script for tests that kill and add workers: prints each step it has taken, and its loss."""

import sys
import time

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main(steps: int, seconds: float) -> None:
    """So many batches of 12 samples in order, with a pause after each."""
    paceline.init()
    torch.manual_seed(3)
    inputs = torch.randn(12 * steps, 6)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = paceline.distribute(model, optimizer)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=12)
    for x, y in paceline.shard(loader, batch="global"):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        paceline.report_loss(loss)
        print(f"step {len(x)}", flush=True)
        time.sleep(seconds)
    paceline.settle()
    print("weights", *(float(v) for p in model.parameters() for v in p.flatten()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
