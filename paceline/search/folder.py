"""The files of one search, written as it goes.

search.toml                the question
study.journal              Optuna's journal: a killed search continues from it
trials.jsonl               one line per trial that ended
trials/007/experiment.toml the question of one trial
trials/007/run/            its run folder
best.toml                  the best experiment, ready to run again
"""

import math
import os
from pathlib import Path

import msgspec

from paceline import spec
from paceline.errors import RecordError, SpecError
from paceline.spec.search import SearchQuestion, Value, load_search, search_to_toml

QUESTION, TRIALS, JOURNAL, BEST = "search.toml", "trials.jsonl", "study.journal", "best.toml"


class TrialEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one trial ended."""

    number: int
    settings: dict[str, Value]
    state: str
    """complete, pruned (ended early), failed, left out (by prediction) or same (as another)."""

    value: float | None = None
    """The goal's value; absent where the trial has none."""

    seconds: float = 0.0
    steps: int = 0
    run: str = ""
    """The run folder, relative to the search's; empty where nothing was run."""

    reason: str = ""
    predicted: dict[str, float] | None = None
    """`low`, `middle` and `high` of the prediction, in the goal's unit."""

    @property
    def was_run(self) -> bool:
        """Return whether processes were started for it."""
        return self.state in ("complete", "pruned", "failed")


class SearchFolder:
    """Paths, writing and reading of one search's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, question: SearchQuestion) -> "SearchFolder":
        """Make the folder with the question in it; it may be there already, empty."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise SpecError("--out", f"{path} exists.", "name a new folder, or use --resume.")
        path.mkdir(parents=True, exist_ok=True)
        (path / QUESTION).write_text(search_to_toml(question), encoding="utf-8")
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "SearchFolder":
        """Open a folder that `paceline search` made."""
        if not (path / QUESTION).is_file():
            problem = f"{path} is not the folder of a search: it has no {QUESTION}."
            raise SpecError("--resume", problem, "name a folder that `paceline search` made.")
        return cls(path)

    def question(self) -> SearchQuestion:
        """Return what is searched."""
        return load_search(self.path / QUESTION)

    @property
    def journal(self) -> Path:
        """Return the path of Optuna's journal."""
        return self.path / JOURNAL

    def trial_path(self, number: int) -> Path:
        """Return the folder of one trial."""
        return self.path / "trials" / f"{number:03d}"

    def entries(self) -> list[TrialEntry]:
        """Return every trial that ended; a last line cut short by a kill is left out."""
        file = self.path / TRIALS
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        try:
            return [msgspec.json.decode(line, type=TrialEntry) for line in lines]
        except msgspec.MsgspecError as error:
            raise RecordError(f"{file} is damaged: {error}") from error

    def add(self, entry: TrialEntry) -> None:
        """Append a trial that ended."""
        if entry.value is not None and not math.isfinite(entry.value):
            entry = msgspec.structs.replace(entry, value=None)
        with (self.path / TRIALS).open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def best(self, entries: list[TrialEntry] | None = None) -> TrialEntry | None:
        """Return the complete trial with the best value; the first of several alike."""
        found = [
            e for e in entries or self.entries() if e.state == "complete" and e.value is not None
        ]
        if not found:
            return None
        goal = spec.parse_goal(self.question().search.goal)
        choose = max if goal.maximizes else min
        return choose(found, key=lambda entry: entry.value or 0.0)

    def write_best(self) -> Path | None:
        """Copy the best trial's experiment to `best.toml`."""
        best = self.best()
        if best is None:
            return None
        text = (self.trial_path(best.number) / "experiment.toml").read_text(encoding="utf-8")
        (self.path / BEST).write_text(text, encoding="utf-8")
        return self.path / BEST
