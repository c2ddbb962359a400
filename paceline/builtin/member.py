"""One member of a built-in workload, worker or server: `python -m paceline.builtin.member`.

The run folder and the member's identity come from the environment that a launcher made. Under a
foreign launcher `train_here` does the same inside the process that was started.
"""

import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.builtin.loop import train
from paceline.errors import PacelineError
from paceline.launch import Identity, identify, meet
from paceline.record import RunFolder
from paceline.session import gathering, stores
from paceline.session.session import Session
from paceline.session.start import init, start


def main() -> int:
    """Run the member that the environment describes; returns its exit status."""
    if not sys.warnoptions:  # libraries warn of what a user of a built-in workload cannot change
        warnings.simplefilter("ignore")
    try:
        session = init()
        folder = RunFolder(Path(session.identity.run))
        _train(folder.experiment(), session, folder)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # the launcher tells it once for all
        return 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def train_here(experiment: spec.Experiment, path: Path) -> RunFolder:
    """Be one member of a job that a foreign launcher started; all members call this alike.

    Worker 0 makes the run folder, and the others write into it. Where they see another file system
    they make one of the same name there.
    """
    identity = meet(identify(os.environ, experiment.cluster.servers), os.environ)
    store = stores.open_store(identity)
    folder = _agreed_folder(experiment, path, identity, store)
    asked, measurement = experiment.architecture, experiment.measurement
    session = start(identity, asked, store, folder, measurement)
    _train(experiment, session, folder)
    return folder


def _agreed_folder(
    experiment: spec.Experiment, path: Path, identity: Identity, store: Store | None
) -> RunFolder:
    if identity.index == 0:
        RunFolder.create(path, experiment)
    agreed = Path(stores.agree(store, identity, "run", str(path.absolute())))
    return RunFolder(agreed) if agreed.exists() else gathering.make_copy(agreed, experiment)


def _train(experiment: spec.Experiment, session: Session, folder: RunFolder) -> None:
    try:
        train(experiment, session, folder)
    except BaseException as error:
        session.close(failed=error)
        raise
    session.close()


if __name__ == "__main__":
    sys.exit(main())
