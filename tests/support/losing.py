"""Jobs of the built-in loop that lose workers on the way: real processes, and nobody ends the rest.

A worker dies by SIGKILL at a point of its own run that a test names, which is always reached; a
test that waits for a step and kills from outside is beside it.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import time
import traceback

import msgspec
import torch

from paceline import architectures, spec
from paceline.architectures import hybrid
from paceline.architectures.hybrid.host_sums import HostCollective
from paceline.builtin import checkpoint, loop, member
from paceline.builtin.loop import _Worker
from paceline.collectives.group import Operation
from paceline.collectives.view_collective import ViewCollective
from paceline.collectives.views import ViewChanged
from paceline.errors import ExchangeError
from paceline.launch import reserve, to_environment
from paceline.protocol.collectives import Reduced
from paceline.record import RunFolder, losses_of, summarise
from paceline.session.commands import local_identities
from paceline.session.session import Session
from paceline.session.start import current as session_now

SECONDS = 100.0
STEPS = 12
PRELOAD = ["paceline.testing", "torch._dynamo", "paceline.models"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def at(step, method, *, after=False, owner=_Worker):
    """Die in the first call of a method of the loop's at this step, or behind it."""
    original = getattr(owner, method)

    def wrapped(self, *arguments, **named):
        reached = session_now().step >= step
        if reached and not after:
            die()
        result = original(self, *arguments, **named)
        if reached:
            die()
        return result

    setattr(owner, method, wrapped)


def die_inside_exchange(step, started):
    """Die when so many sums of a step have been started, and none waited for."""
    original, count = ViewCollective.start, [0]

    def counted(self, flat):
        original(self, flat)
        if session_now().step == step and flat.numel() > 1:
            count[0] += 1
            if count[0] == started:
                time.sleep(0.2)  # the others get what of it they can
                die()

    ViewCollective.start = counted


def die_in_function(module, name, step=0):
    original = getattr(module, name)

    def wrapped(*arguments, **named):
        if session_now().step >= step:
            die()
        return original(*arguments, **named)

    setattr(module, name, wrapped)


def die_sharing(step, bucket):
    """Die as the leader of a host when all have summed, and it has told its mates of the first
    buckets."""
    original = HostCollective._tell

    def tell(self, event):
        if event == Reduced(bucket) and session_now().step == step:
            time.sleep(0.2)  # they take what they can
            die()
        original(self, event)

    HostCollective._tell = tell


def stay_behind(step, *, helps=False):
    """Give up on the sums of a step though all of them come: another one is ahead then. Inside a
    host none come unless this one `helps` to make them."""
    original, given_up = Operation.wait, []

    def wait(self):
        current = session_now()
        if current.step == step and not given_up:
            given_up.append(True)
            if helps:
                original(self)
            end = time.monotonic() + SECONDS / 2
            while not current.view_changes.must_stop:
                assert time.monotonic() < end, "nobody was lost"
                time.sleep(0.01)
            raise ViewChanged
        original(self)

    Operation.wait = wait


def give_up():
    """End as one that has found the others to be wrong."""

    def step(*_):
        if session_now().step == 5:
            raise ExchangeError("these weights cannot be")
        return original(*_)

    original, _Worker.step = _Worker.step, step


HAPPENINGS = {
    "gives up": give_up,
    "before it meets the others' weights": lambda: die_in_function(architectures, "build"),
    "in the first forward pass": lambda: at(0, "_pass"),
    "in the middle": lambda: at(5, "_pass"),
    "between backward and step": lambda: at(5, "_pass", after=True),
    "a step later": lambda: at(6, "_pass"),
    "inside an exchange": lambda: die_inside_exchange(5, 1),
    "inside an exchange, late": lambda: die_inside_exchange(5, 2),
    "when leaders have summed": lambda: at(5, "finish", after=True, owner=hybrid.RingSums),
    "when it leads and has shared one bucket": lambda: die_sharing(5, 1),
    "in the last step": lambda: at(STEPS - 1, "_pass"),
    "behind the last step": lambda: at(STEPS, "finish"),
    "in a checkpoint": lambda: die_in_function(checkpoint, "save", 6),
    "in the evaluation": lambda: die_in_function(loop, "accuracy"),
    "stays behind in step 5": lambda: stay_behind(5),
    "stays behind in step 11": lambda: stay_behind(11),
    "stays behind its host in step 5": lambda: stay_behind(5, helps=True),
}


def be_member(environment, what, output):
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    keep_weights(output.with_suffix(".pt"))
    hybrid.BUCKET_BYTES = 64 << 10  # several, of which some may be summed and some not
    if what is not None:
        HAPPENINGS[what]()
    status = 1
    try:
        status = member.main()
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def keep_weights(path):
    """What the worker ends with, for the test to compare."""
    original = Session.end_together

    def end_together(self):
        original(self)
        torch.save(self.distribution.trained[0].model.state_dict(), path)

    Session.end_together = end_together


class Losing:
    """`deaths`: worker -> how it dies; `also`: worker -> what happens to it beside that; worker i
    is on the host `hosts[i]`."""

    def __init__(
        self, tmp_path, architecture, *, workers=3, deaths=None, also=None, hosts="", **workload
    ):
        asked = {"model": "mnist-dnn", "data": "synthetic", "steps": STEPS, "seed": 3}
        asked |= {"global_batch": 24, "optimizer": spec.Optimizer(name="sgd", momentum=0.9)}
        options = spec.parse_architecture(architecture)
        experiment = spec.Experiment(
            architecture=options,
            workload=spec.Workload(**{**asked, **workload}),
            cluster=spec.Cluster(workers=workers, on_loss="continue"),
        )
        self.folder = RunFolder.create(tmp_path / "run", experiment)
        self._tmp_path = tmp_path
        self._happens = {**(deaths or {}), **(also or {})}
        self._reserved = reserve("127.0.0.1")  # worker 0 listens there by itself
        identities = local_identities(experiment, self.folder, self._reserved)
        told = [
            msgspec.structs.replace(
                one, coordinator_descriptor=-1, host=hosts[one.rank] if hosts else one.host
            )
            for one in identities
        ]
        self._told = {
            one.name: {**to_environment(one), **architectures.to_environment(options)}
            for one in told
        }
        self.members = {}

    def __enter__(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for name, environment in self._told.items():
            arguments = (environment, self._happens.get(name), self._output(name))
            self.members[name] = context.Process(target=be_member, args=arguments)
            self.members[name].start()
        return self

    def __exit__(self, *_):
        for process in self.members.values():
            process.kill()
            process.join()
        self._reserved.close()

    def _output(self, name):
        return self._tmp_path / f"{name}.txt"

    def said(self, name):
        return self._output(name).read_text() if self._output(name).exists() else ""

    def wait(self):
        until = time.monotonic() + SECONDS
        for process in self.members.values():
            process.join(max(0.1, until - time.monotonic()))

    def end(self, *lost):
        """Wait for all; those that are to die must have, the others must have ended well."""
        self.wait()
        for name, process in self.members.items():
            expected = -signal.SIGKILL if name in lost else 0
            words = {one: self.said(one) for one in self.members}
            assert process.exitcode == expected, f"{name}: {process.exitcode} {words}"

    def weights(self, name):
        return torch.load(self._output(name).with_suffix(".pt"), weights_only=True)

    def losses(self):
        summarise(self.folder, "finished")
        return losses_of(self.folder)

    def events(self, kind="lost"):
        return [event for event in self.folder.events() if event.kind == kind]
