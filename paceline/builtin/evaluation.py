"""Accuracy of the trained model on the test part: top-1 and top-5."""

import torch
from torch import nn

from paceline import data

BATCH = 256


@torch.no_grad()
def accuracy(model: nn.Module, test: data.Dataset, device: torch.device) -> dict[str, float]:
    """Shares of samples (or tokens) whose class is the first, and among the first five, guesses."""
    was_training = model.training
    model.eval()
    batches = data.GlobalBatches(len(test), BATCH, shuffle=False, keep_last=True)
    guesses = min(5, test.num_classes)
    first = among = total = 0
    for step in range(batches.steps_per_epoch):
        inputs, targets = test.batch(batches.indices(step))
        # Classes are dimension 1, also where each row has many places (tokens).
        guessed = model(inputs.to(device)).topk(guesses, dim=1).indices
        right = guessed == targets.to(device).unsqueeze(1)
        first += int(right[:, 0].sum())
        among += int(right.sum())
        total += targets.numel()
    model.train(was_training)
    top1 = {"top1": first / total}
    return top1 if test.num_classes <= 5 else {**top1, "top5": among / total}
