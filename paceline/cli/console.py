"""How verbs talk: progress on stderr, results on stdout, JSON when asked."""

import atexit
import contextlib
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paceline import spec
from paceline.errors import SpecError
from paceline.record import cannot_write

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def print_json(value: object) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")
    sys.stdout.flush()


def print_question(
    question: spec.Experiment | spec.Comparison | spec.SearchQuestion, *, json: bool
) -> None:
    """What `--dry-run` prints: a file that can be read back, or the same as JSON; never folded."""
    if isinstance(question, spec.Comparison):
        text = spec.comparison_to_toml(question)
    elif isinstance(question, spec.SearchQuestion):
        text = spec.search_to_toml(question)
    else:
        text = spec.to_toml(question)
    if json:
        print_json(tomllib.loads(text))
        return
    sys.stdout.write(text)
    sys.stdout.flush()


def new_run_path(name: str, asked: Path | None) -> Path:
    """Return where a run goes: as asked, or runs/<time>-<name>, with a number if that is taken.

    The folder is made at once, so that of two jobs started in one second each has its own; one
    that is still empty in the end is removed.
    """
    if asked is not None:
        check_target(asked)
        return asked
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    candidates = [Path("runs") / stem, *(Path("runs") / f"{stem}-{n}" for n in range(2, 1000))]
    return next(path for path in candidates if _reserved(path))


def _reserved(path: Path) -> bool:
    """Whether the folder did not exist, and was made."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise cannot_write(path, error) from error
    atexit.register(_remove_empty, path)
    return True


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


def check_target(path: Path, flag: str = "--out", *, may_exist: bool = False) -> None:
    """Raise SpecError where nothing can be written, before anything is begun."""
    if path.exists() and not may_exist:
        raise SpecError(flag, f"{path} exists.", "name a place where nothing is yet.")
    above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if above != path and not above.is_dir():
        problem = f"{path} cannot be made: {above} is a file."
        raise SpecError(flag, problem, "name a place below a folder.")
    try:
        # Tried, not asked: root may write everywhere, and yet not below /proc.
        with tempfile.TemporaryFile(dir=above) if above.is_dir() else above.open("ab"):
            pass
    except OSError as error:
        problem = f"{path} cannot be written: {above}: {error.strerror}."
        raise SpecError(flag, problem, "name a place where you may write.") from None


class Steps:
    """Told how many steps are done; shows nothing."""

    def __call__(self, steps: int) -> None:
        pass

    def paused(self) -> AbstractContextManager[None]:
        """Out of the way while somebody else writes to the terminal."""
        return nullcontext()


class _Bar(Steps):
    """A bar with the time left."""

    def __init__(self, progress: Progress, label: str, num_steps: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=num_steps)

    def __call__(self, steps: int) -> None:
        self._progress.update(self._task, completed=steps)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


@contextmanager
def step_progress(label: str, num_steps: int | None) -> Iterator[Steps]:
    """A bar of steps with the time left; plain lines now and then where stderr is no terminal."""
    if not err.is_terminal:
        yield _Lines(label, num_steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        yield _Bar(progress, label, num_steps)


class _Lines(Steps):
    """Progress for a log file: a line every ten seconds."""

    def __init__(self, label: str, num_steps: int | None) -> None:
        self._label, self._of = label, f" of {num_steps}" if num_steps else ""
        self._last = time.monotonic()

    def __call__(self, steps: int) -> None:
        if time.monotonic() - self._last >= 10:
            self._last = time.monotonic()
            err.print(f"{self._label}: step {steps}{self._of}")
