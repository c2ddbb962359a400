"""Training on this machine's cores: ours beside DDP and TensorFlow, launch by launch.

    python benchmarks/training.py --json
    python benchmarks/training.py --only alexnet --contenders ring ddp --repeats 3 --quick
    python benchmarks/training.py --contenders colocated horovod --peer-python horovod=PYTHON

All train the same samples from the same first weights, one thread per worker. In every round each
contender is launched once, in an order that turns, so that noise hits all alike; a check compares
medians of the ratios within rounds. Step times are medians without the warm-up.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline import engines, spec
from paceline.bench.peers import PEERS, peer, runner
from paceline.errors import PacelineError
from paceline.record import RunFolder
from paceline.units import format_bytes

Row = dict[str, Any]

SETTINGS: dict[str, tuple[str, tuple[int, ...], int, int]] = {
    "tutorial-cnn-32": ("tutorial-cnn", (3, 32, 32), 32, 80),
    "tutorial-cnn-100": ("tutorial-cnn", (3, 32, 32), 100, 40),
    "resnet50": ("resnet50", (3, 32, 32), 32, 16),
    "alexnet": ("alexnet", (3, 64, 64), 32, 16),
}
"""Name -> model, shape of a sample, samples per worker, steps of a run."""

WARMUP_STEPS = {80: 15, 40: 8, 16: 4}

OURS = {
    "single": "single",
    "ring": "ring",
    "colocated": "server:placement=colocated",
    "dedicated": "server",
}
CONTENDERS = (
    *(*OURS, "ddp", "tensorflow-single", "tensorflow-collective", "tensorflow-server"),
    *("keras-ring", "keras-colocated"),
)
CLOSE = 0.99
"""Not slower by more than 1 %."""


def main() -> None:
    given = parse()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="paceline-training-") as folder:
        for setting in given.only:
            cells = [(c, n) for n in given.workers for c in given.contenders if fits(c, n)]
            for repeat in range(given.repeats):
                turned = cells[repeat % len(cells) :] + cells[: repeat % len(cells)]
                for contender, workers in turned:
                    path = Path(folder) / f"{setting}-{contender}-{workers}-{repeat}"
                    python = given.peer_python.get(contender, sys.executable)
                    row = measure(setting, contender, workers, path, given.quick, python)
                    rows.append({**row, "repeat": repeat})
                    show(rows[-1])
    result = {"rows": rows, "checks": checks(rows)}
    if "single" in given.contenders:
        cost = overhead(given.quick)
        result = {key: result[key] + cost[key] for key in result}
    print(json.dumps(result) if given.json else table(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    names = [*OURS, *PEERS]
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=names)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="half the steps")
    named = "another interpreter for a peer, PEER=PYTHON"
    parser.add_argument("--peer-python", action="append", default=[], help=named)
    given = parser.parse_args()
    given.peer_python = dict(text.split("=", 1) for text in given.peer_python)
    return given


def fits(contender: str, workers: int) -> bool:
    """Single processes run on one worker; servers of ours need somebody to serve."""
    if contender == "single" or (contender in PEERS and PEERS[contender].one_worker_only):
        return workers == 1
    return workers > 1 or contender not in ("colocated", "dedicated")


def measure(
    setting: str, contender: str, workers: int, path: Path, quick: bool, python: str
) -> Row:
    """One launch; a failure is a row that says why."""
    model, shape, batch, steps = SETTINGS[setting]
    warmup = WARMUP_STEPS[steps]
    steps = max(warmup + 4, steps // 2) if quick else steps
    experiment = spec.Experiment(
        workload=spec.Workload(
            model=model,
            data="synthetic",
            input_shape=shape,
            batch=batch,
            steps=steps,
            optimizer=spec.Optimizer(learning_rate=1e-3),
        ),
        cluster=spec.Cluster(workers=workers, threads=1),
        measurement=spec.Measurement(warmup_steps=warmup),
    )
    row: Row = {"setting": setting, "contender": contender, "workers": workers}
    with PeakMemory(path) as memory:
        try:
            if contender in OURS:
                chosen = spec.parse_architecture(OURS[contender])
                folder = engines.run(spec.replace(experiment, architecture=chosen), path)
            else:
                folder = runner.run(experiment, peer(contender), path, python=python)
        except PacelineError as error:
            return {**row, "failed": str(error)}
    return {**row, **figures(folder, batch * workers), "memory_bytes": memory.most_bytes}


class PeakMemory:
    """The most that all members together held, looked at every second.

    Memory that members share counts once: each is charged its part of it.
    """

    def __init__(self, run: Path) -> None:
        self._run, self.most_bytes = RunFolder(run), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            pids = [member.pid for member in self._run.members() if member.pid]
            self.most_bytes = max(self.most_bytes, sum(_proportional_bytes(pid) for pid in pids))


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:  # it has ended
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return 1024 * int(line.split()[1])


def figures(folder: RunFolder, global_batch: int) -> Row:
    summary = folder.summary()
    assert summary.step_seconds is not None
    seconds = summary.step_seconds.median
    rate = global_batch / seconds
    found: Row = {"seconds": seconds, "samples_per_second": rate}
    if summary.loss is not None:
        found |= {"loss_first": summary.loss.first, "loss_last": summary.loss.last}
    return found


def checks(rows: list[Row]) -> list[Row]:
    """The lines of the speed table that these rows can answer."""
    found: list[Row] = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting]
        for workers in sorted({row["workers"] for row in own}):
            where = f"{setting}, {workers} worker{'s' if workers > 1 else ''}"
            found += _check(f"ring against DDP, {where}", own, "ring", "ddp", workers, CLOSE)
        ahead = 1.1 if setting == "alexnet" else 1.0
        where = f"{setting}, 2 workers"
        found += _check(f"colocated against DDP, {where}", own, "colocated", "ddp", 2, ahead)
        name = f"peak memory of DDP against colocated's, {where}"
        found += _check(name, own, "colocated", "ddp", 2, 1.0, "memory_bytes")
        for other in ("tensorflow-collective", "tensorflow-server", "horovod"):
            name = f"colocated against {other}, {where}"
            found += _check(name, own, "colocated", other, 2, 1.0)
        for ours in ("keras-ring", "keras-colocated"):
            for other in ("tensorflow-collective", "tensorflow-server", "horovod-tensorflow"):
                found += _check(f"{ours} against {other}, {where}", own, ours, other, 2, 1.0)
        name = f"single against TensorFlow's plain process, {setting}"
        found += _check(name, own, "single", "tensorflow-single", 1, 1.0)
    return found


def _check(
    name: str,
    rows: list[Row],
    ours: str,
    theirs: str,
    workers: int,
    target: float,
    field: str = "seconds",
) -> list[Row]:
    """How many times what we take they take: the median over rounds in which both ran."""
    pairs = list(_pairs(rows, ours, theirs, workers, field))
    if not pairs:
        return []
    value = statistics.median(taken_by_them / taken_by_us for taken_by_us, taken_by_them in pairs)
    row = {"name": name, "value": value, "target": f">= {target}", "holds": value >= target}
    return [{**row, "rounds": len(pairs)}]


def _pairs(
    rows: list[Row], ours: str, theirs: str, workers: int, field: str
) -> Iterable[tuple[float, float]]:
    by_round = {
        (row["contender"], row["repeat"]): row[field]
        for row in rows
        if row["workers"] == workers and field in row
    }
    for (contender, repeat), value in by_round.items():
        if contender == ours and (theirs, repeat) in by_round:
            yield value, by_round[theirs, repeat]


def overhead(quick: bool) -> dict[str, list[Row]]:
    """What `distribute` costs on one worker, from the benchmark that alternates step by step."""
    script = Path(__file__).with_name("telemetry.py")
    command = [sys.executable, str(script), "--json", "--pairs", "60" if quick else "150"]
    command += ["--only", "tutorial-cnn"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    found: dict[str, list[Row]] = json.loads(done.stdout)
    return found


def show(row: Row) -> None:
    where = f"{row['setting']:17} {row['contender']:22} {row['workers']}"
    print(where, row["failed"].splitlines()[0] if "failed" in row else _shown(row), file=sys.stderr)


def _shown(row: Row) -> str:
    rate, memory = row["samples_per_second"], format_bytes(row["memory_bytes"])
    return f"{1e3 * row['seconds']:8.1f} ms {rate:9.1f} samples/s, {memory}"


def table(result: dict[str, list[Row]]) -> str:
    lines = []
    timed = [row for row in result["rows"] if "samples_per_second" in row]
    for key in dict.fromkeys((r["setting"], r["contender"], r["workers"]) for r in timed):
        own = [r for r in timed if (r["setting"], r["contender"], r["workers"]) == key]
        middle = {
            field: statistics.median(r[field] for r in own)
            for field in own[0]
            if field in ("seconds", "samples_per_second", "memory_bytes")
        }
        lines.append(f"{key[0]:17} {key[1]:22} {key[2]} {_shown(middle)}")
    for check in result["checks"]:
        verdict = "holds" if check["holds"] else "FAILS"
        lines.append(f"{verdict}  {check['name']}: {check['value']:.3f} ({check['target']})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
