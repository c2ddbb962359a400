"""Foreign jobs for these tests: processes with the variables that torchrun sets."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.ports import reserve
from paceline.record import RunFolder, open_folder

JOB = Path(__file__).resolve().parents[2] / "benchmarks" / "foreign" / "job.py"
DEADLINE_SECONDS = 200
"""Importing torch and a trainer takes a minute where many others are at work."""


@dataclass(frozen=True)
class Ended:
    """What the ranks of a job printed, and how they ended."""

    output: tuple[str, ...]
    errors: tuple[str, ...]
    statuses: tuple[int, ...]

    @property
    def weights(self) -> list[str]:
        return [line for text in self.output for line in text.splitlines() if "WEIGHTS" in line]


def begin(
    ranks: int, *given: str, out: Path | None = None, script: Path = JOB, **variables: str
) -> list[subprocess.Popen[str]]:
    """Start a job; `out` observes it and names the folder."""
    observed = [] if out is None else ["-m", "paceline.observe", "--out", str(out)]
    command = [sys.executable, *observed, str(script), *given]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **variables}
    with reserve("127.0.0.1") as held:
        number = str(held.getsockname()[1])
    return [
        subprocess.Popen(
            command,
            env={
                **base,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": number,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def wait(processes: list[subprocess.Popen[str]]) -> Ended:
    """All that they said; they are killed when it takes too long."""
    said = []
    try:
        said = [process.communicate(timeout=DEADLINE_SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return Ended(
        tuple(out for out, _ in said),
        tuple(error for _, error in said),
        tuple(process.returncode for process in processes),
    )


def job(
    ranks: int, *given: str, out: Path | None = None, script: Path = JOB, **variables: str
) -> Ended:
    return wait(begin(ranks, *given, out=out, script=script, **variables))


def observed(path: Path) -> RunFolder:
    return open_folder(path)
