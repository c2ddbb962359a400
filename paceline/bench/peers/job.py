"""What a peer's process is told, and the records it writes: the same files as one of our members.

Read by processes of other frameworks, maybe in another interpreter: imports neither torch nor
TensorFlow. The samples and the first weights are arrays that `export` wrote, so every peer trains
on the same numbers.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline import spec
from paceline.errors import PacelineError
from paceline.launch import Identity, identify
from paceline.record import RunFolder, Step
from paceline.telemetry import Recorder, StepClock

VARIABLE = "PACELINE_PEER"
"""Environment variable that names the job's folder."""

JOB, DONE = "job.json", "done"

Array = NDArray[Any]


class PeerJob(msgspec.Struct, frozen=True, kw_only=True):
    """One training, as its processes need to know it."""

    model: str
    input_shape: tuple[int, ...]
    num_classes: int
    steps: int
    threads: int
    optimizer: spec.Optimizer
    parts: tuple[tuple[int, int], ...]
    """Which part of a global batch is each worker's: start and stop."""

    addresses: tuple[str, ...]
    """host:port of every member: workers, then servers, then the coordinator where there is one."""

    num_samples: int
    """Samples in the whole data set, for the time of an epoch."""


class PeerMember:
    """One process of a peer: who it is, its samples, its recorder."""

    def __init__(self, folder: Path, identity: Identity, recorder: Recorder) -> None:
        self.folder, self.identity, self.recorder = folder, identity, recorder
        self.job = msgspec.json.decode((folder / JOB).read_bytes(), type=PeerJob)
        self.samples: Array = np.load(folder / "samples.npy", mmap_mode="r")
        self.targets: Array = np.load(folder / "targets.npy")
        self.order: Array = np.load(folder / "order.npy")

    def weights(self) -> dict[str, Array]:
        """The first weights by their torch names, in torch's order and layout."""
        with np.load(self.folder / "weights.npz") as arrays:
            return dict(arrays)

    def indices(self, step: int, worker: int) -> Array:
        """Places in `samples` of one worker's part of a step."""
        start, stop = self.job.parts[worker]
        part: Array = self.order[step, start:stop]
        return part

    def batch(self, step: int) -> tuple[Array, Array]:
        """This worker's inputs and targets; pictures have their channels last."""
        chosen = self.indices(step, self.identity.rank)
        return self.samples[chosen], self.targets[chosen]

    def train(self, one_step: Callable[[Array, Array], Any]) -> None:
        """Run and record every step; `one_step` returns the loss as anything `float` takes.

        What happens inside a step is the framework's own business, so only the input is told apart.
        """
        clock = StepClock()
        pending: tuple[Step, Any] | None = None
        for step in range(self.job.steps):
            clock.enter("input")
            inputs, targets = self.batch(step)
            clock.enter("other")
            loss = one_step(inputs, targets)
            self.add(pending)
            pending = clock.end_step(step, len(targets)), loss
        self.add(pending)

    def add(self, finished: tuple[Step, Any] | None) -> None:
        """Write a step, one step late, when reading its loss costs no wait."""
        if finished is not None:
            entry, loss = finished
            entry.loss = float(loss)
            self.recorder.add_step(entry)


@contextmanager
def member(*, coordinated: bool = False, **versions: str) -> Iterator[PeerMember]:
    """Be the member that the environment names, recorded for as long as the block lasts.

    Where the peer is `coordinated`, the last member is neither worker nor server.
    """
    identity, folder = identify(os.environ), Path(os.environ[VARIABLE])
    run = RunFolder(Path(identity.run))
    coordinates = coordinated and identity.index == identity.workers + identity.servers - 1
    recorder = Recorder(
        run,
        name="coordinator0" if coordinates else identity.name,
        role="coordinator" if coordinates else identity.role,
        host=identity.host,
        owns_interfaces=identity.owns_interfaces,
        sample_seconds=run.experiment().measurement.sample_seconds,
    )
    recorder.member.versions.update(versions)
    with recorder:
        this = PeerMember(folder, identity, recorder)
        if identity.role == "worker":
            recorder.member.results["num_samples"] = this.job.num_samples
        yield this


def run(main: Callable[[], None]) -> None:
    """Be the process: run `main`, say what went wrong, and leave at once.

    Not through the interpreter's own ending: frameworks' threads may hold that up for ever.
    """
    status = 0
    try:
        main()
    except PacelineError as error:
        print(f"error: {error}", flush=True)
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
