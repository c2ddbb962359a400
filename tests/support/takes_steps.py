"""A script for tests that kill and add workers: prints the size of each part it has trained on.

    takes_steps.py STEPS SECONDS [GATE]

With a gate, workers that were there from the start wait at step 48 for one who joins, and it for
them: then they go on, and it enters some steps later; before their last steps they wait until it
has been admitted. Where the variable HOLD names a file, they wait for that too. One who joins where
GUEST says so leaves after so many steps. DECAY=0.98 lets a schedule multiply the rate each step.
FAILS=worker1:20 raises there, between backward and step.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.collectives.views import Views
from paceline.protocol.actions import Action
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import Admitted
from paceline.protocol.views import View

GATE_STEP, GATE_SECONDS = 48, 90.0
LAST_STEPS = 20


def main(steps: int, seconds: float, gate: Path | None) -> None:
    """So many batches of 12 samples in two passes, with a pause after each."""
    paceline.init()
    torch.manual_seed(3)
    inputs = torch.randn(6 * steps, 6)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    joins = "PACELINE_JOIN" in os.environ
    if gate is not None and joins:
        tell_when_admitted(gate.with_suffix(".admitted"))
        meet(gate.with_suffix(".newcomer"), gate.with_suffix(".worker0"))
    model, optimizer = paceline.distribute(model, optimizer)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, float(os.environ.get("DECAY", "1")))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True)
    loader, taken = paceline.shard(loader, batch="global"), 0
    stays = int(os.environ["GUEST"]) if joins and "GUEST" in os.environ else steps
    for _ in range(2):
        for x, y in loader:
            if taken == stays:
                return
            if gate is not None and taken == GATE_STEP and not joins:
                own = gate.with_suffix(f".worker{paceline.rank()}")
                meet(own, gate.with_suffix(".newcomer"))
            if taken == steps - LAST_STEPS and not joins:
                if gate is not None:
                    wait_for(gate.with_suffix(".admitted"))
                if "HOLD" in os.environ:
                    wait_for(Path(os.environ["HOLD"]))
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            if joins and "IDLE" in os.environ:
                loss = loss * 0.0
            loss.backward()
            if os.environ.get("FAILS") == f"worker{paceline.rank()}:{taken}":
                raise RuntimeError("it fails here")
            optimizer.step()
            if "DECAY" in os.environ:
                decay.step()
            paceline.report_loss(loss)
            taken += 1
            print(f"step {len(x)}", flush=True)
            time.sleep(seconds)
    paceline.settle()
    print("weights", *(v for p in model.parameters() for v in p.flatten().tolist()), flush=True)


def tell_when_admitted(file: Path) -> None:
    """Make a file when there is a place for this worker: from then on the others wait for it."""
    own_join = Views.join

    def join(self: Views) -> View:
        view = own_join(self)
        file.touch()
        return view

    Views.join = join  # type: ignore[method-assign]
    original = ExchangeMachine._admitted

    def admitted(self: ExchangeMachine, event: Admitted) -> list[Action]:
        file.touch()
        return original(self, event)

    ExchangeMachine._admitted = admitted  # type: ignore[method-assign]


def meet(own: Path, other: Path) -> None:
    own.touch()
    wait_for(other)


def wait_for(other: Path) -> None:
    end = time.monotonic() + GATE_SECONDS
    while not other.exists():
        assert time.monotonic() < end, f"{other} did not come"
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
