"""The plain DDP script that benchmarks/tunnel.py compares with: torch's reducer, no Paceline in it.

Started as a worker of a tunnel; only who it is and where its steps are recorded come from Paceline.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import spec
from paceline.collectives.group import interface_of
from paceline.compute.emulated import model_for
from paceline.record import RunFolder
from paceline.session.session import Session


def main() -> None:
    session: Session = paceline.init()
    assert session.recorder is not None
    model_name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    experiment = RunFolder(Path(session.identity.run)).experiment()
    described = spec.replace(experiment, workload=spec.Workload(model=model_name))
    emulated = model_for(described, session.identity.name)
    assert emulated is not None, "this benchmark emulates its devices"
    # gloo would otherwise choose the interface by resolving the name of the machine.
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(session.identity.address) or ""
    store = session.context(torch.device("cpu"), 0).store
    assert store is not None, "the workers of this benchmark meet at a store"
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("ddp", store),
        rank=session.rank,
        world_size=session.workers,
    )
    model = DistributedDataParallel(emulated, gradient_as_bucket_view=True)
    inputs, targets = torch.zeros(batch, 1), torch.zeros(batch, dtype=torch.long)
    clock = session.clock
    for step in range(steps):
        model.zero_grad()
        clock.enter("forward")
        loss = functional.cross_entropy(model(inputs), targets)
        clock.enter("backward")
        loss.backward()
        session.recorder.add_step(clock.end_step(step, batch))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
