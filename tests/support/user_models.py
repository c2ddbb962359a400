"""Models for the loop's tests, named to it as "module:function"."""

import time
from pathlib import Path

import torch
from torch import nn

from paceline import models
from paceline.record import RunFolder
from paceline.session.start import current, init

FAULT_STEPS, FAULT_SECONDS = 30, 90.0


def broken_on_worker_1() -> nn.Module:
    """Cannot be built on worker 1."""
    if init().rank == 1:
        time.sleep(0.5)
        raise RuntimeError("planted failure")
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def with_dropout(num_classes: int) -> nn.Module:
    """Draws random numbers in every step."""
    layers = [nn.Linear(3 * 32 * 32, 32), nn.Dropout(0.5), nn.Linear(32, num_classes)]
    return nn.Sequential(nn.Flatten(), *layers)


def on_one_thread() -> nn.Module:
    """For a member that shares this machine's cores, though it has an emulated host to itself."""
    threads = torch.get_num_threads()
    assert threads == 1, f"{threads} threads"
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def normed(num_classes: int) -> nn.Module:
    """Keeps statistics of the batches that it saw."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 6 * 6, num_classes))


def that_waits_for_its_faults(num_classes: int) -> nn.Module:
    """adult-dnn, which does not run away from a launcher that is slow to disturb it: some steps
    behind one at which something is to happen, it waits until that has."""
    model = models.build("adult-dnn", num_classes=num_classes)
    folder = RunFolder(Path(init().identity.run))
    due = sorted(fault.at_step + FAULT_STEPS for fault in folder.experiment().faults)
    waited = 0

    def wait(*_: object) -> None:
        nonlocal waited
        while waited < len(due) and due[waited] <= current().step:
            waited += 1
            _wait_for_faults(folder, waited)

    model.register_forward_pre_hook(wait)
    return model


def that_stays_at_step_100(num_classes: int) -> nn.Module:
    """adult-dnn; worker 1 does not get further, and the others wait for it, until all are ended."""
    model = models.build("adult-dnn", num_classes=num_classes)

    def stay(*_: object) -> None:
        if current().rank == 1 and current().step == 100:
            time.sleep(1000.0)

    model.register_forward_pre_hook(stay)
    return model


def _wait_for_faults(folder: RunFolder, count: int) -> None:
    end = time.monotonic() + FAULT_SECONDS
    while sum(event.kind == "fault" for event in folder.events()) < count:
        assert time.monotonic() < end, "nothing has happened"
        time.sleep(0.02)
