"""One trial as a process: `paceline train` or `paceline run` on its own experiment file."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from paceline import spec
from paceline.record import RunFolder
from paceline.record.summary import losses_of
from paceline.settings import ASKED_VARIABLE
from paceline.spec.search import SETTING

GRACE_SECONDS = 30.0
"""Time a trial has to end and to write its summary after it was asked to."""


class TrialProcess:
    """A trial that runs. Its run folder can be read at any time."""

    def __init__(self, path: Path, experiment: spec.Experiment) -> None:
        path.mkdir(parents=True, exist_ok=True)
        question = path / "experiment.toml"
        question.write_text(spec.to_toml(experiment), encoding="utf-8")
        self._wanted = experiment.settings
        self._asked = path / "settings.asked"
        self.folder = RunFolder(path / "run")
        self.began = time.monotonic()
        self._seen = -1
        self._losses: dict[int, float] = {}
        verb = "train" if experiment.workload.script is None else "run"
        options = ["--out", str(self.folder.path), str(question)]
        command = [sys.executable, "-m", "paceline", verb, *options]
        lifeline = [sys.executable, "-m", "paceline.launch.lifeline", str(os.getpid())]
        self._log = path / "log.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*lifeline, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, ASKED_VARIABLE: str(self._asked.absolute())},
                start_new_session=True,  # Ctrl-C reaches the search, which ends its trials itself
            )

    @property
    def status(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    @property
    def seconds(self) -> float:
        """Return the time since it was started."""
        return time.monotonic() - self.began

    def losses(self) -> dict[int, float]:
        """Return the loss of each step so far; the files are read again only when they grew."""
        files = list((self.folder.path / "members").glob("*.steps.jsonl"))
        size = sum(file.stat().st_size for file in files)
        if files and size != self._seen:
            self._seen, self._losses = size, losses_of(self.folder)
        return self._losses

    def ask_to_end(self) -> None:
        """Ask it to end; it leaves a readable run."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Ask it to end and wait until it has, at most for the time of grace."""
        self.ask_to_end()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self._process.wait()

    def last_line(self) -> str:
        """Return what it said about its failure: the error, or else its last line."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        return (errors or said or [f"it ended with status {self.status}"])[-1]

    def unasked_settings(self) -> list[str]:
        """Return settings of the search that the user's code never asked for."""
        asked = self._asked.read_text(encoding="utf-8").split("\n") if self._asked.exists() else []
        return [f"{SETTING}{name}" for name in self._wanted if name not in asked]
