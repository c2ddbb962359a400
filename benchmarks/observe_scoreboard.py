"""Verdicts on foreign jobs with one planted cause each: how many are right.

The jobs (foreign/job.py) never import Paceline. Each is observed on this machine by processes with
the variables that torchrun sets, and its verdict is compared with what was planted. An innocent
run must be accused of nothing; a machine that others use makes them sick, and then says so.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.explain import explain
from paceline.observe.finish import refresh
from paceline.record import open_folder

JOB = Path(__file__).resolve().parent / "foreign" / "job.py"
KINDS = ("ddp", "accumulate", "fsdp2", "plain")
STEP = ("--step-ms", "45", "--width", "64", "--layers", "3")
DEADLINE_SECONDS = 180.0
HANG_SECONDS = "5"


@dataclass(frozen=True)
class Case:
    """A job, and the words of which one must be in its first cause or in its verdict."""

    kind: str
    plant: str
    causes: tuple[str, ...] = ()
    said: str = ""
    ranks: int = 2
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.plant or 'innocent'}"


def cases() -> Iterator[Case]:
    late = ("slow-worker",)
    for kind in KINDS:
        yield Case(kind, "")
        yield Case(kind, "late-forward", late, "rank1")
        yield Case(kind, "late-backward", late, "rank1")
        yield Case(kind, "late-input", late, "rank1")
        yield Case(kind, "late-pause", late, "rank1")
        yield Case(kind, "hang", ("failed",), "for rank 1")
    for kind in ("ddp", "fsdp2", "single"):
        ranks = 1 if kind == "single" else 2
        yield Case(kind, "input", ("input",), ranks=ranks)
        yield Case(kind, "pause", ("overhead",), ranks=ranks)
        yield Case(kind, "nan", ("not-finite",), "not a number", ranks=ranks)
    yield Case("single", "", ranks=1)
    yield Case("ddp", "checkpoint", ("pauses",), "checkpoints")
    yield Case("ddp", "evaluate", ("pauses",), "evaluations")
    yield Case("ddp", "raise", ("failed",), "a bad batch")
    yield Case("ddp", "hang-order", ("failed",), "different collectives")
    yield Case("ddp", "late-forward", late, "rank1", options=("--norm",))
    yield Case("ddp", "late-backward", late, "rank2", ranks=3)


def run(case: Case, folder: Path, port: int) -> None:
    """Observe the job to its end; one that hangs is ended once it has been said."""
    command = [sys.executable, "-m", "paceline.observe", "--out", str(folder), str(JOB)]
    command += ["--kind", case.kind, "--plant", case.plant, *STEP, *case.options]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    base |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks)}
    base |= {"PACELINE_OBSERVE_STALL": HANG_SECONDS}
    ranks = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(case.ranks)
    ]
    events, until = folder / "events.jsonl", time.monotonic() + DEADLINE_SECONDS
    while any(one.poll() is None for one in ranks) and time.monotonic() < until:
        time.sleep(0.3)
        failed = any(one.poll() not in (None, 0) for one in ranks)
        if failed or (events.exists() and b'"stall"' in events.read_bytes()):
            time.sleep(2.0)
            break
    for one in ranks:
        if one.poll() is None:
            one.send_signal(signal.SIGTERM)
        one.wait()


def judge(case: Case, folder: Path) -> dict[str, object]:
    """What the verdict says, and whether it is right."""
    try:
        found = open_folder(folder)
        refresh(found)
        explanation = explain(found)
    except PacelineError as error:
        return {"case": case.name, "right": False, "verdict": str(error), "causes": []}
    names = [cause.name for cause in explanation.causes]
    if case.causes:
        right = bool(names) and names[0] in case.causes and case.said in explanation.verdict
    else:
        right = explanation.healthy
    return {
        "case": case.name,
        "right": right,
        "causes": names,
        "verdict": explanation.verdict,
        "seconds": explanation.step_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for number, case in enumerate(c for c in cases() if args.only in c.name):
            folder = Path(place) / f"case{number}"
            run(case, folder, 21_000 + (os.getpid() + 7 * number) % 20_000)
            rows.append(judge(case, folder))
            if not args.json:
                mark = "right" if rows[-1]["right"] else "WRONG"
                print(f"{mark:6} {case.name:24} {rows[-1]['verdict']}", flush=True)
    share = sum(bool(row["right"]) for row in rows) / max(len(rows), 1)
    checks = [{"name": "verdicts right", "value": share, "target": 0.9, "holds": share >= 0.9}]
    if args.json:
        print(json.dumps({"rows": rows, "checks": checks}))
    else:
        print(checks[0], len(rows))


if __name__ == "__main__":
    main()
