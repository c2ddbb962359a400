"""Entering a job, and leaving it: the public `init`.

It finds out who it is (a launcher says so in the environment), opens the job's store, and makes the
one `Session` of this process. A server member serves here until the workers are done.
"""

import atexit
import os
import sys
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from paceline import architectures, spec
from paceline.compute.freed_memory import keep_freed_memory
from paceline.diagnose import thread_stacks
from paceline.errors import PacelineError, SpecError
from paceline.launch import Identity, identify, meet
from paceline.launch.failures import check_survives
from paceline.record import RunFolder, summarise
from paceline.session import checkup, joining, stores
from paceline.session.recording import folder_of
from paceline.session.serving import Serving
from paceline.session.session import Session

_session: Session | None = None


def init() -> Session:
    """Find out who this process is and join the job; the first call of a script.

    On a server member this does not return: it serves until the workers are done, then exits.
    """
    if _session is not None:
        return _session
    identity = meet(identify(os.environ), os.environ)
    store: Store | None
    if identity.launcher == "join":
        identity, asked, store = joining.join(identity)
    else:
        asked = architectures.from_environment() or spec.Auto()
        store = stores.open_store(identity)
    folder, measurement = None, spec.Measurement()
    if identity.run:
        folder = RunFolder(Path(identity.run))
    elif identity.launcher != "join" and (
        folder := folder_of(identity, _resolve(asked, identity), store)
    ):
        atexit.register(_summarise, folder, identity.index)
    if folder is not None:
        measurement = folder.experiment().measurement
    return start(identity, asked, store, folder, measurement)


def start(
    identity: Identity,
    asked: spec.Architecture,
    store: Store | None,
    folder: RunFolder | None,
    measurement: spec.Measurement,
) -> Session:
    """Make this process's session; `init` for those who know who they are."""
    global _session
    keep_freed_memory()
    if folder is not None:
        thread_stacks.answer(folder.path, identity.name)
    options = _resolve(asked, identity)
    if identity.goes_on:
        check_survives(options)
    _session = Session(
        identity, options=options, store=store, folder=folder, measurement=measurement
    )
    if store is not None and not _session.participants.has_joined:
        checkup.check(identity, store, options, _session.note)
        if identity.index == 0:
            joining.announce(store, identity, options)
    if identity.role == "server":
        _serve(_session)
    atexit.register(_close_at_exit)
    return _session


def current() -> Session:
    """The session of this process; an error that says what to do if init() was not called."""
    if _session is None:
        raise SpecError("paceline", "init() was not called.", "call paceline.init() first.")
    return _session


def _resolve(asked: spec.Architecture, identity: Identity) -> spec.Architecture:
    gpus = torch.cuda.device_count() * (identity.workers // max(identity.local_members, 1) or 1)
    hosts = 1 if identity.local_members >= identity.workers + identity.servers else 2
    resolved, _ = architectures.resolve(asked, workers=identity.workers, hosts=hosts, gpus=gpus)
    return resolved


def _serve(session: Session) -> None:
    """Serve every call of `distribute` until worker 0 has made the last one."""
    serving, number, store = Serving(session.options), 0, session.store
    assert store is not None, "a job with servers has workers to meet"
    while serving.is_more(store):
        serving.start(session.context(torch.device("cpu"), number))
        number += 1
    serving.wait()
    if session.recorder is not None:
        session.recorder.member.counters.update(serving.counters)
    session.close()
    sys.exit(0)


def _summarise(folder: RunFolder, index: int) -> None:
    """Exit handlers run in reverse, so that this one finds every member's record complete."""
    if index == 0:
        failed = any(member.status == "failed" for member in folder.members())
        summarise(folder, "failed" if failed else "finished")


def _close_at_exit() -> None:
    """An unhandled exception is in sys.last_value by the time exit handlers run."""
    if _session is None:
        return
    try:
        _session.close(failed=getattr(sys, "last_value", None))
    except PacelineError as error:  # an exit handler has no other way to say so
        print(f"error: {error}\n  The script caught this and went on.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_status)
