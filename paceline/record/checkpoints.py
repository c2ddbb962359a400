"""Checkpoints as files: which there are, which are whole, what they were made with. No torch.

    checkpoints/step-00000010.pt            weights, optimizer, next step; `torch.load` reads it
    checkpoints/step-00000010.worker1.pt    what only worker 1 knows, where there is such a thing
    checkpoints/step-00000010.json          written last: size and SHA-256 of each, and the facts

Without its last file a checkpoint is not there. What a file lacks or has too much is noticed before
anything of it is used, and the checkpoint before is taken.
"""

import contextlib
import errno
import hashlib
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline import spec
from paceline.errors import SpecError

FOLDER = "checkpoints"
FORMAT_VERSION = 1
FIX = "name a run folder made with --checkpoint-every."


class File(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    sha256: str


class TrainingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a checkpoint was made with, as far as they matter for resuming."""

    model: str
    data: str
    optimizer: str
    seed: int
    global_batch: int
    workers: int
    architecture: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a checkpoint's last file."""

    format_version: int
    step: int
    """The step that comes next."""

    files: dict[str, File]
    facts: TrainingFacts


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint from which a run can resume."""

    path: Path
    """Path of its last file."""

    manifest: Manifest
    passed_over: list[str] = []
    """Newer ones that are damaged, a sentence each."""

    def file(self, member: str) -> Path | None:
        """A worker's own part; None where it has none. Worker 0's is the main file."""
        name = self.path.with_suffix(".pt").name
        if member != "worker0":
            name = name.removesuffix(".pt") + f".{member}.pt"
        return self.path.with_name(name) if name in self.manifest.files else None


def facts_of(experiment: spec.Experiment) -> TrainingFacts:
    workload, workers = experiment.workload, experiment.cluster.workers
    return TrainingFacts(
        model=workload.model,
        data=workload.data,
        optimizer=workload.optimizer.name,
        seed=workload.seed,
        global_batch=workload.global_batch_for(workers),
        workers=workers,
        architecture=spec.format_architecture(experiment.architecture),
    )


def describe(path: Path) -> File:
    """A file as it is now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return File(size_bytes=path.stat().st_size, sha256=digest)


def choose(path: Path) -> Found:
    """The newest whole checkpoint of a run folder, or the very one that `path` names."""
    if path.is_file():
        named = path.with_suffix(".json")
        found, problem = _read(named)
        if found is None:
            raise SpecError("resume", problem, "name another checkpoint, or the run folder.")
        return found
    manifests = _manifests(path)
    passed_over: list[str] = []
    for manifest in manifests:
        found, problem = _read(manifest)
        if found is not None:
            return msgspec.structs.replace(found, passed_over=passed_over)
        passed_over.append(problem)
    if passed_over:
        raise SpecError("resume", " ".join(passed_over), "name another run folder: none is left.")
    raise SpecError("resume", f"{path} has no whole checkpoint.", FIX)


def exist(run: Path) -> bool:
    """Return whether a run folder has a checkpoint, whole or not."""
    return bool(_manifests(run))


def _manifests(run: Path) -> list[Path]:
    try:
        return sorted((run / FOLDER).glob("step-*.json"), reverse=True)
    except OSError as error:
        problem = f"{run / FOLDER} cannot be read: {error.strerror}."
        raise SpecError("resume", problem, FIX) from None


def _read(path: Path) -> tuple[Found | None, str]:
    """A checkpoint whose files are as they were written; else what is wrong, in a sentence."""
    try:
        _check_is_file(path)
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        if manifest.format_version > FORMAT_VERSION:
            return None, f"{path} is of a newer Paceline (format {manifest.format_version})."
        for name, written in manifest.files.items():
            part = path.with_name(Path(name).name)
            _check_is_file(part)
            found = describe(part)
            if found.size_bytes != written.size_bytes:
                have = f"{found.size_bytes} bytes of {written.size_bytes}"
                return None, f"{part} is damaged: it has {have}."
            if found.sha256 != written.sha256:
                return None, f"{part} is damaged: its checksum is not the one it was written with."
    except OSError as error:
        return None, f"{error.filename or path} cannot be read: {error.strerror}."
    except msgspec.MsgspecError as error:
        return None, f"{path} is damaged: {error}."
    return Found(path=path, manifest=manifest), ""


def _check_is_file(path: Path) -> None:
    """Raise OSError unless it is a plain file: opening a pipe would wait for its writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))


def differences(found: Found, experiment: spec.Experiment) -> Iterator[str]:
    """Yield a sentence for each setting in which this run differs from the one that it resumes.

    Raises if the run cannot resume at all.
    """
    was, now, step = found.manifest.facts, facts_of(experiment), found.manifest.step
    for name in ("model", "optimizer"):
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            problem = f"{found.path} is of {name} {before}, and this run has {after}."
            raise SpecError("resume", problem, f"leave --{name} as it was.")
    workload = experiment.workload
    last = workload.steps or (0 if workload.epochs else 50)
    if last and step >= last:
        problem = f"{found.path} has {step} steps behind it, and steps = {last}: nothing is left."
        raise SpecError("resume", problem, f"write --steps {step + last} to train {last} more.")
    if was.data != now.data:
        yield f"the checkpoint was trained on {was.data}, and goes on with {now.data}."
    if was.seed != now.seed:
        yield (
            f"the checkpoint has seed {was.seed}, and this run {now.seed}: samples come in another "
            "order than if it had not stopped."
        )
    if was.global_batch != now.global_batch:
        yield (
            f"the checkpoint took {was.global_batch} samples a step, and this run takes "
            f"{now.global_batch}: the steps from here on are others."
        )
    if was.architecture != now.architecture or was.workers != now.workers:
        yield from _of_architecture(found, was, now)


def _of_architecture(found: Found, was: TrainingFacts, now: TrainingFacts) -> Iterator[str]:
    before, after = (f"{facts.architecture} with {facts.workers} workers" for facts in (was, now))
    text = f"the checkpoint is of {before}, and this run is {after}: "
    own = any(name.count(".") > 1 for name in found.manifest.files)
    if own:
        yield text + "what each worker kept for itself is worker 0's, or starts anew."
    elif was.global_batch == now.global_batch:
        yield text + "the same samples a step, so the same training up to rounding."
    else:
        yield text + "it goes on from the same weights."


def sweep(run: Path) -> int:
    """Remove what a kill in the middle of writing left behind; returns how many files."""
    removed = 0
    with contextlib.suppress(OSError):
        for partial in (run / FOLDER).glob(".step-*"):
            partial.unlink(missing_ok=True)
            removed += 1
    return removed
