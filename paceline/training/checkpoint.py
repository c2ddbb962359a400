"""Checkpoints: everything a run needs to go on as if it had never stopped.

The order of samples, the learning rate and the random numbers of a step are functions of the step,
so a checkpoint holds the weights, the optimizer's state and the number of the next step.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import SpecError

FOLDER = "checkpoints"


def save(run: Path, *, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
    """Write the state before `step`; a reader sees the whole file or none."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    target = folder / f"step-{step:08d}.pt"
    partial = folder / f".{target.name}.{os.getpid()}"
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
    return target


def exists(run: Path) -> bool:
    """Whether the run in folder `run` has a checkpoint."""
    return any((run / FOLDER).glob("step-*.pt"))


def latest(run: Path) -> Path:
    """The newest checkpoint of the run in folder `run`."""
    found = sorted((run / FOLDER).glob("step-*.pt"))
    if not found:
        fix = "name a run folder made with --checkpoint-every."
        raise SpecError("resume", f"{run} has no checkpoint.", fix)
    return found[-1]


def load(path: Path, *, model: nn.Module, optimizer: Optimizer) -> int:
    """Put a checkpoint's state into `model` and `optimizer`; return the step that comes next."""
    state = torch.load(path, weights_only=True)
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError) as error:
        problem = f"{path} does not fit this model: {str(error).splitlines()[0]}"
        raise SpecError("resume", problem, "resume with the same model and optimizer.") from None
    return int(state["step"])
