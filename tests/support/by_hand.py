"""Members started by hand: processes that know each other by torch's four variables only."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from paceline import spec
from paceline.launch import invitation, reserve
from paceline.record import RunFolder

PROGRAM = Path(__file__).with_name("takes_steps.py")
SECONDS = 80.0
KEY = "a key of this test"


def be_member(environment, arguments, output):
    """Run the program as a process of its own would."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv, status = [str(PROGRAM), *arguments], 0
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as ending:  # a server that is done
        status = ending.code or 0
    except BaseException as error:
        traceback.print_exc()
        sys.last_value, status = error, 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Job:
    """They take `steps`, and are given `more` arguments.

    The last ones are taken once the test waits for the endings: what it does on the way comes in
    time, however slow it is.
    """

    def __init__(self, tmp_path, architecture, workers, servers, steps=80, more=(), on_loss="stop"):
        options = spec.parse_architecture(architecture)
        cluster = spec.Cluster(workers=workers, servers=servers, on_loss=on_loss)
        experiment = spec.Experiment(architecture=options, cluster=cluster)
        self.folder = RunFolder.create(tmp_path / "run", experiment)
        self._reserved, self._hold = reserve("127.0.0.1"), tmp_path / "hold"
        port = self._reserved.getsockname()[1]
        told = {
            "WORLD_SIZE": str(workers + servers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PACELINE_SERVERS": str(servers),
            "PACELINE_ARCHITECTURE": architecture,
            "PACELINE_RUN": str(self.folder.path),
            "PACELINE_KEY": KEY,
            "PACELINE_ON_LOSS": on_loss,
            "HOLD": str(self._hold),
        }
        self._coordinator, self._tmp_path = f"127.0.0.1:{port}", tmp_path
        self._arguments = (str(steps), "0.02", *more)
        names = [f"worker{rank}" for rank in range(workers)]
        names += [f"server{rank}" for rank in range(servers)]
        self.outputs, self.members = {}, {}
        self._told = {name: {**told, "RANK": str(index)} for index, name in enumerate(names)}

    def __enter__(self):
        for name, environment in self._told.items():
            self.start(name, environment)
        return self

    def start(self, name, environment):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.testing", "torch._dynamo"])
        self.outputs[name] = output = self._tmp_path / f"{name}.txt"
        arguments = (environment, self._arguments, output)
        self.members[name] = context.Process(target=be_member, args=arguments)
        self.members[name].start()

    def join(self, name):
        """One more worker, which its job will call so."""
        self.start(name, {invitation.VARIABLE: self._coordinator, "PACELINE_KEY": KEY})

    def __exit__(self, *_):
        for member in self.members.values():
            member.kill()
            member.join()
        self._reserved.close()

    def said(self, name):
        return self.outputs[name].read_text() if self.outputs[name].exists() else ""

    def kill(self, name, steps=6):
        """When it has taken so many steps, or every worker has where it is a server: one that is
        still about to begin would miss worker 0 first."""
        workers = [one for one in self.members if one.startswith("worker")]
        end = time.monotonic() + SECONDS
        for watched in [name] if name in workers else workers:
            while self.said(watched).count("step ") < steps:
                assert time.monotonic() < end, self.said(watched)
                assert self.members[watched].is_alive(), self.said(watched)
                time.sleep(0.01)
        self.members[name].kill()
        self.members[name].join()
        assert self.members[name].exitcode == -signal.SIGKILL

    def endings(self, but=""):
        """Exit status and words of all others."""
        self._hold.touch()
        for member in self.members.values():
            member.join(SECONDS)
        names = [name for name in self.members if name != but]
        return {name: (self.members[name].exitcode, self.said(name)) for name in names}
