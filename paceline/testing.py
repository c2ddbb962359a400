"""Run a function as the members of a real job, with a deadline, and leave nothing behind. Public.

    losses = run_members(train_a_little, workers=2, architecture=spec.Ring())

Each member is a process with its own session; servers serve. A member's exception is raised here
with its traceback, a silent member is named when the deadline passes, and every process is ended.
"""

import math
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import reduction, resource_sharer
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import architectures, spec
from paceline.errors import DeadlineError, MemberError, MissingError
from paceline.launch import Identity, to_environment
from paceline.launch.interfaces import ELSEWHERE, source_towards
from paceline.record import RunFolder
from paceline.session import start
from paceline.session.commands import local_identities

_PRELOAD = ["paceline.testing", "paceline.models", "paceline.data", "torch._dynamo"]
"""torch._dynamo takes two seconds to import, and the first optimizer of a process imports it."""


def run_members(
    function: Callable[..., Any],
    *arguments: object,
    workers: int,
    servers: int = 0,
    architecture: spec.Architecture | None = None,
    timeout_seconds: float = 60.0,
    folder: RunFolder | None = None,
    apart: bool = False,
) -> list[Any]:
    """Call `function(session, *arguments)` on every worker; return what each returned, in order.

    `function` must be importable (defined at the top of a module). With `folder` the run is
    recorded there. `apart`: as if each member had a host of its own, so that what they say goes
    by TCP and is encrypted; the host needs an address beside loopback.
    """
    options = architecture or (spec.Single() if workers == 1 else spec.Ring())
    experiment = spec.Experiment(
        architecture=options, cluster=spec.Cluster(workers=workers, servers=servers)
    )
    # Children fork from a server that imported torch and ran nothing: fast, and safe with threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as temporary, socket.socket() as coordinator:
        coordinator.bind((_outer_address() if apart else "127.0.0.1", 0))
        coordinator.listen(128)
        identities = local_identities(experiment, folder or RunFolder(Path(temporary)), coordinator)
        if apart:
            alone = {"local_index": 0, "local_members": 1, "local_workers": 1}
            identities = [msgspec.structs.replace(each, **alone) for each in identities]
        members = [
            _Member(
                context, identity, coordinator, options, folder is not None, function, arguments
            )
            for identity in identities
        ]
        try:
            _collect(members, time.monotonic() + timeout_seconds, timeout_seconds)
        finally:
            for member in members:
                member.end()
            resource_sharer.stop()  # the thread that handed over the coordinator's descriptor
    return [member.result for member in members if member.name.startswith("worker")]


def _outer_address() -> str:
    address = source_towards(ELSEWHERE)
    if address is None:
        raise MissingError("this host has no address but loopback.", "leave out `apart`.")
    return address


class _Member:
    """One child process and the pipe its result comes through."""

    def __init__(
        self,
        context: multiprocessing.context.ForkServerContext,
        identity: Identity,
        coordinator: socket.socket,
        options: spec.Architecture,
        recorded: bool,
        function: Callable[..., Any],
        arguments: Sequence[object],
    ) -> None:
        self.name, self.result, self.done = identity.name, None, False
        self.pipe, theirs = context.Pipe(duplex=False)
        keeps = identity.index == 0
        self.process = context.Process(
            target=_be_member,
            args=(
                msgspec.structs.replace(identity, run=identity.run if recorded else ""),
                reduction.DupFd(coordinator.fileno()) if keeps else None,
                options,
                theirs,
                function,
                arguments,
            ),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[float, MemberError] | None:
        """Take what it has left in its pipe: when it failed and how, or its result."""
        try:
            error, self.result, moment = self.pipe.recv()
        except EOFError:
            self.process.join(5)
            status = self.process.exitcode or 0
            # Nobody is killed for having lost another one; who crashes without a word may be.
            moment = 0.0 if status == -signal.SIGKILL else math.inf
            return moment, MemberError(self.name, status, [])
        self.done = True
        return None if error is None else (moment, MemberError(self.name, 1, error.splitlines()))

    def end(self) -> None:
        if self.process.is_alive():
            self.process.join(2.0 if self.done else 0.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _collect(members: Sequence[_Member], deadline: float, timeout_seconds: float) -> None:
    """Wait for every member's result; raise the first failure or the deadline."""
    while silent := [member for member in members if not member.done]:
        left = deadline - time.monotonic()
        ready = wait([member.pipe for member in silent], max(0.0, left))
        if not ready:
            raise DeadlineError("run_members", timeout_seconds, [member.name for member in silent])
        found = [member.receive() for member in silent if member.pipe in ready]
        failures = [failure for failure in found if failure is not None]
        if failures:
            # Whoever lost another one fails after it, and both may have failed before we looked.
            raise min(failures, key=lambda failure: failure[0])[1]


def _be_member(
    identity: Identity,
    descriptor: Any,
    options: spec.Architecture,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: Sequence[object],
) -> None:
    if descriptor is not None:
        identity = msgspec.structs.replace(identity, coordinator_descriptor=descriptor.detach())
    os.environ.update({**to_environment(identity), **architectures.to_environment(options)})
    torch.set_num_threads(1)
    try:
        session = start.init()
        result = function(session, *arguments)
        session.close()
        pipe.send((None, result, time.monotonic()))
    except SystemExit:  # a server that is done
        pipe.send((None, None, time.monotonic()))
    except BaseException:
        moment = time.monotonic()
        pipe.send((traceback.format_exc(), None, moment))
    os._exit(0)  # nothing of the test's interpreter is this child's to clean up
