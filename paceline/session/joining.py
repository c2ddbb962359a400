"""Joining a running job: the description of the job, and a number for the worker that joins.

Weights and the step to start at come from the servers (`protocol/admission.py`). By then all that
can be known is checked: a worker that has a place and fails is lost to the others.
"""

import contextlib
import hashlib
import platform
import shlex
import sys
import time
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.diagnose import doctor
from paceline.errors import DeadlineError, ExchangeError, MissingError, SpecError
from paceline.launch import Identity
from paceline.session import join_obstacle, stores

KEY = "job"
REACH_SECONDS = 3.0
AGAIN_SECONDS = 0.2
WHERE = "--join"


class JobDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that worker 0 leaves in the store for workers that join later."""

    architecture: spec.Architecture
    workers: int
    servers: int
    host: str
    """The host of all members; empty where they are on several."""

    owns_interfaces: bool
    run: str
    script: str
    arguments: tuple[str, ...]
    goes_on: bool = False


def announce(store: Store, identity: Identity, options: spec.Architecture) -> None:
    """Called by worker 0 before it trains."""
    job = JobDescription(
        architecture=options,
        workers=identity.workers,
        servers=identity.servers,
        host=platform.node() if identity.on_one_host else "",
        owns_interfaces=identity.owns_interfaces,
        run=identity.run,
        script=_own_script(),
        arguments=tuple(sys.argv[1:]),
        goes_on=identity.goes_on,
    )
    store.set(KEY, msgspec.json.encode(job).decode())


def check(identity: Identity, script: spec.Script) -> None:
    """Raise SpecError where the job at the coordinator of `identity` cannot take a worker in, or
    nobody answers there: before the script is started, which would find that out."""
    with contextlib.closing(_open(identity)) as store:
        job = _look(store, identity)
    if job.script != (_digest(script.path) if script.path else script.module):
        problem = f"{script.name} is not, or no more, what the job's workers run."
        raise SpecError(WHERE, problem, "join with the same script.")
    if job.arguments != script.arguments:
        theirs = f"with {shlex.join(job.arguments)}" if job.arguments else "without arguments"
        problem = f"the job's workers run {script.name} {theirs}, and this one would differ."
        raise SpecError(WHERE, problem, "give it the same arguments.")


def _own_script() -> str:
    """Return what this process runs: the name of a module, or the digest of a file."""
    main = sys.modules["__main__"]
    module = getattr(main, "__spec__", None)
    if module is not None and module.name != "__main__":
        return str(module.name.removesuffix(".__main__"))
    return _digest(getattr(main, "__file__", None) or "")


def _digest(path: str) -> str:
    file = Path(path) / "__main__.py" if Path(path).is_dir() else Path(path)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def join(identity: Identity) -> tuple[Identity, spec.Architecture, Store]:
    """Find the job at the coordinator of `identity`; who this worker is there.

    SpecError for a job that cannot take it in; that changes nothing there.
    """
    store = _open(identity)
    job = _look(store, identity)
    index = job.workers + store.add("joined", 1) - 1
    is_here = job.host == platform.node()
    known = msgspec.structs.replace(
        identity,
        index=index,
        workers=index + 1,
        servers=job.servers,
        founders=job.workers,
        host=platform.node(),
        local_index=index,
        local_members=index + 1 + job.servers if is_here else 1,
        owns_interfaces=job.owns_interfaces,
        goes_on=job.goes_on,
        run=job.run if job.run and (Path(job.run) / "members").is_dir() else "",
    )
    store.identity = known
    return known, job.architecture, store


def _open(identity: Identity) -> stores.JobStore:
    """The job's store. One who was asked to join is not early: if there is no listener, the job has
    ended, and a wait as long as founders wait for each other would be for nothing."""
    there = identity.coordinator
    if problem := _unreached(there):
        fix = "name the run folder, or the coordinator HOST:PORT, of a job that runs."
        raise SpecError(WHERE, f"nobody answers at {there} ({problem}).", fix)
    try:
        store = stores.open_store(identity)
    except (DeadlineError, ExchangeError, MissingError) as error:
        fix = "check the address, and that PACELINE_KEY is the job's."
        raise SpecError(WHERE, f"no job at {there} takes this worker in: {error}", fix) from error
    assert store is not None, "there are others"
    return store


def _unreached(there: str) -> str:
    """Empty once the job listens there; a job that starts may need a moment for it."""
    address, _, port = there.rpartition(":")
    end = time.monotonic() + REACH_SECONDS
    while problem := doctor.reach(address, int(port), REACH_SECONDS):
        if time.monotonic() >= end:
            break
        time.sleep(AGAIN_SECONDS)
    return problem


def _look(store: Store, identity: Identity) -> JobDescription:
    """Return the job's description once it has taken a step; SpecError if no worker can join it."""
    job = msgspec.json.decode(
        _learn(store, identity, KEY), type=JobDescription, dec_hook=spec.decode_hook
    )
    _check(job)
    if why := _learn(store, identity, join_obstacle.KEY):
        problem = f"{why}: there is no part for one more worker."
        fix = "let it shard one loader and train one model, or start it with all its workers."
        raise SpecError(WHERE, problem, fix)
    return job


def _learn(store: Store, identity: Identity, key: str) -> str:
    try:
        return stores.agree(store, identity, key, None)
    except ExchangeError as error:
        problem = f"the job at {identity.coordinator} ended before this worker got in."
        raise SpecError(WHERE, problem, "start another one.") from error
    except DeadlineError as error:
        problem = f"the job at {identity.coordinator} takes no steps: {error}"
        raise SpecError(WHERE, problem, "join it when it trains.") from error


def _check(job: JobDescription) -> None:
    name, where = spec.format_architecture(job.architecture), WHERE
    kind = job.architecture
    if not (kind.takes_newcomers and (job.servers if kind.is_served else job.goes_on)):
        problem = f"the job trains by {name} with {job.servers} servers: its workers stay the same."
        fix = "start it with dedicated servers that update: --architecture server --servers 1."
        if kind.takes_newcomers and not kind.is_served:
            fix = "start it with --on-loss continue."
        raise SpecError(where, problem, fix)
    if job.workers == 1:
        problem = "the job began with one worker, which reads whole batches."
        raise SpecError(where, problem, "start it with two workers or more.")
    if job.host and job.host != platform.node():
        problem = f"all members are on {job.host} and listen there only; this is {platform.node()}."
        raise SpecError(where, problem, "join it from there, or start it on several hosts.")
