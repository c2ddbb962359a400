"""How a worker gets into a job that runs: what the job says of itself, and a number of its own.

Weights and the step to start at come from the servers (`protocol/admission.py`).
"""

import platform
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.errors import SpecError
from paceline.launch import Identity
from paceline.training import stores

KEY = "job"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What worker 0 leaves in the store for those who come later."""

    architecture: spec.Architecture
    workers: int
    servers: int
    host: str
    """The host of all members; empty where they are on several."""

    owns_interfaces: bool
    has_key: bool
    """The launcher has given members a key."""

    run: str
    goes_on: bool = False


def announce(store: Store, identity: Identity, options: spec.Architecture) -> None:
    """Called by worker 0 before it trains."""
    job = Job(
        architecture=options,
        workers=identity.workers,
        servers=identity.servers,
        host=platform.node() if identity.on_one_host else "",
        owns_interfaces=identity.owns_interfaces,
        has_key=bool(identity.key),
        run=identity.run,
        goes_on=identity.goes_on,
    )
    store.set(KEY, msgspec.json.encode(job).decode())


def join(identity: Identity) -> tuple[Identity, spec.Architecture, Store]:
    """Find the job at the coordinator of `identity`; who this worker is there.

    SpecError for a job that cannot take it in; that changes nothing there.
    """
    store = stores.open_store(identity)
    assert store is not None, "there are others"
    job = msgspec.json.decode(stores.agree(store, identity, KEY, None), type=Job)
    _check(job, identity)
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
    return known, job.architecture, store


def _check(job: Job, identity: Identity) -> None:
    name, where = spec.format_architecture(job.architecture), "--join"
    if not (job.architecture.takes_newcomers and job.servers):
        problem = f"the job trains by {name} with {job.servers} servers: its workers stay the same."
        fix = "start it with dedicated servers: --architecture server --servers 1."
        raise SpecError(where, problem, fix)
    if job.workers == 1:
        problem = "the job began with one worker, which reads whole batches."
        raise SpecError(where, problem, "start it with two workers or more.")
    if job.has_key and not identity.key:
        problem = "the job has a key, and this worker has none."
        raise SpecError(where, problem, "set PACELINE_KEY to the job's.")
    if job.host and job.host != platform.node():
        problem = f"all members are on {job.host} and listen there only; this is {platform.node()}."
        raise SpecError(where, problem, "join it from there, or start it on several hosts.")
