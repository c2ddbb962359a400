"""What a rank does in test_mpi.py: `mpirun … python -m tests.support.mpi_program OUT`.

Trains the small model of tests/support/curves.py and writes each step's loss, weighted by this
worker's part of the batch. MPI_TEST_LOSE="2@20" makes rank 2 kill itself in step 20, before
backward.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline import data
from paceline.session.loader.sharding import division, gradient_scale
from paceline.session.start import current
from tests.support.curves import GLOBAL_BATCH, SAMPLES, STEPS, samples, small_model


def main(out: Path) -> None:
    torch.set_num_threads(1)
    session = paceline.init()
    rank_to_lose, _, step_to_lose = os.environ.get("MPI_TEST_LOSE", "-1@0").partition("@")
    inputs, targets = samples()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = paceline.distribute(model, optimizer)
    batches = data.GlobalBatches(SAMPLES, GLOBAL_BATCH, seed=1)
    shares = [float(share) for share in os.environ["MPI_TEST_SHARES"].split(",")]
    losses = []
    for step in range(STEPS):
        indices = batches.indices(step)
        there, place = division(shares, session.participants)
        session.gradients.scale_by(gradient_scale(GLOBAL_BATCH, there, place))
        own = indices[data.split(GLOBAL_BATCH, there)[place]]
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        optimizer.zero_grad()
        if session.rank == int(rank_to_lose) and step == int(step_to_lose):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) * len(own) / GLOBAL_BATCH)
    current().close()
    result = {"losses": losses, "members": session.participants.members}
    (out / f"{session.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
