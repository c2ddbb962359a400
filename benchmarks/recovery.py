"""What a killed member costs: until it is noticed, until training is as fast as before, and what
becomes of the trained model.

    python benchmarks/recovery.py --json
    python benchmarks/recovery.py --only tunnel --cells ring-worker-restart ring-worker-pause
    python benchmarks/recovery.py --only peers --peer-python torchft=PYTHON horovod=PYTHON

`tunnel`: three workers with emulated devices at 1 Gbit; a worker or a server is killed, or stopped
(`pause`), or its cable is out (`cut`), for a while: how long until that is told. `here`:
real processes and a real model on this machine; the loss beside that of the undisturbed run.
`peers`: the same kill under torchrun, torchft and Horovod elastic, by `recovery_peers.py`.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import recovery_peers

from paceline import engines, spec
from paceline.bench import drill
from paceline.errors import PacelineError, SpecError
from paceline.launch.failures import check_on_loss
from paceline.record import RecordedEvent, RunFolder
from paceline.record.lives import RESTART

ARCHITECTURES = {
    "server": ("server", 1),
    "servers": ("server:transport=tcp", 2),
    "colocated": ("server:placement=colocated", 0),
    "ring": ("ring", 0),
    "average": ("average:every=4", 0),
    "async": ("server:mode=async", 1),
    "quorum": ("server:mode=quorum,quorum=2", 1),
}
TOLD = ("server", "ring")
"""Where hangs are measured unless cells are named: what tells of them is the same for all."""

STEPS, AT_STEP, CHECKPOINT_EVERY = 60, 33, 10
WORKERS = 3
LAST_STEPS = 10
"""Whose mean loss is the loss at the end."""

DETECTION_SECONDS = 2.0
WORKER_STEPS, SERVER_STEPS = 3.0, 5.0
"""What a killed worker and a killed server may cost, in step times, beside being noticed."""

HANG_STEPS = 5.0
"""Within so many step times it is told that somebody is stopped or cut off."""

HANG_SECONDS, HANG_STEP, HANG_LAST = 10.0, 12, 35
HANGS = ("pause", "cut")

Row = dict[str, Any]


def main() -> None:
    given = parse()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for part in given.only:
            for row in PARTS[part](given, Path(temporary)):
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
    result = {"rows": rows, "checks": [check for row in rows for check in checks(row)]}
    print(json.dumps(result) if given.json else table(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cells", nargs="+", help="of tunnel and here; see `cells`")
    parser.add_argument(
        "--data-dir", default="", help="of MNIST, for `here`; synthetic if left out"
    )
    parser.add_argument("--peers", nargs="+", choices=recovery_peers.PEERS)
    parser.add_argument("--peer-python", nargs="+", default=[], metavar="PEER=PYTHON")
    return parser.parse_args()


def cells() -> dict[str, tuple[str, str, str]]:
    """Name -> architecture, who is killed, what is asked for then."""
    found = {}
    for name, (_, servers) in ARCHITECTURES.items():
        for victim in ("worker", *(("server",) if servers else ())):
            for choice in ("restart", "continue", *HANGS):
                found[f"{name}-{victim}-{choice}"] = (name, victim, choice)
    return found


def chosen(given: argparse.Namespace) -> Iterator[tuple[str, str, str, str]]:
    for name, cell in cells().items():
        if name in given.cells if given.cells else cell[2] not in HANGS or cell[0] in TOLD:
            yield name, *cell


def in_tunnel(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for name, architecture, victim, choice in chosen(given):
        asked = experiment(architecture, victim, choice)
        asked = spec.replace(asked, engine="tunnel", link="1gbit", device="k80", model="googlenet")
        yield from _measured(name, asked, folder / f"tunnel-{name}", None)


def here(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    undisturbed: dict[str, RunFolder] = {}
    for name, architecture, victim, choice in chosen(given):
        if choice in HANGS:
            continue  # steps are milliseconds here, and a job is watched once a second
        asked = experiment(architecture, victim, choice)
        asked = spec.replace(
            asked, model="mnist-dnn", data="mnist" if given.data_dir else "synthetic"
        )
        if given.data_dir:
            asked = spec.replace(asked, data_dir=given.data_dir)
        if architecture not in undisturbed:
            calm = spec.replace(asked, faults=(), restarts=0, on_loss="stop")
            undisturbed[architecture] = engines.run(calm, folder / f"calm-{architecture}")
        yield from _measured(name, asked, folder / f"here-{name}", undisturbed[architecture])


def experiment(architecture: str, victim: str, choice: str) -> spec.Experiment:
    text, servers = ARCHITECTURES[architecture]
    asked = spec.Experiment(
        architecture=spec.parse_architecture(text),
        cluster=spec.Cluster(
            workers=WORKERS,
            servers=servers,
            restarts=1 if choice == "restart" else 0,
            on_loss="continue" if choice == "continue" else "stop",
        ),
        workload=spec.Workload(
            model="mnist-dnn",
            data="synthetic",
            global_batch=32 * WORKERS,
            steps=HANG_LAST if choice in HANGS else STEPS,
            checkpoint_every=CHECKPOINT_EVERY,
        ),
    )
    member = f"{victim}{WORKERS - 1 if victim == 'worker' else 0}"
    if choice not in HANGS:
        fault = spec.Fault(member=member, at_step=AT_STEP, kind="kill")
    else:
        fault = spec.Fault(member=member, at_step=HANG_STEP, kind=choice, seconds=HANG_SECONDS)
    return drill.with_faults(asked, [fault])


def _measured(
    name: str, asked: spec.Experiment, path: Path, undisturbed: RunFolder | None
) -> Iterator[Row]:
    """One row; one that says why where the choice cannot be had."""
    row: Row = {"name": name, "engine": asked.engine}
    try:
        check_on_loss(asked)
        run = _stopped(asked, path) if name.endswith("worker-pause") else engines.run(asked, path)
    except SpecError as error:
        yield {**row, "cannot": str(error).splitlines()[0]}
        return
    except PacelineError as error:
        yield {**row, "failed": str(error).splitlines()[0]}
        return
    row |= _times(run)
    if undisturbed is not None:
        score = drill.score(undisturbed, run)
        ends = [_last_loss(undisturbed), _last_loss(run)]
        row |= {"loss_difference": score.loss_difference, "last_losses": ends}
    yield row


def _stopped(asked: spec.Experiment, path: Path) -> RunFolder:
    """Its worker stopped by a signal: the fault of that name makes an emulated device stumble,
    where there is one, and its process would still answer."""
    (fault,), asked = asked.faults, spec.replace(asked, faults=())
    undo: list[threading.Timer] = []

    def stop(steps: int) -> None:
        if steps < fault.at_step or undo:
            return
        folder = RunFolder(path)
        (pid,) = [one.pid for one in folder.members() if one.name == fault.member]
        assert pid is not None, "it runs on this machine"
        now = time.monotonic() / asked.cluster.dilation
        event = RecordedEvent(time_seconds=now, member=fault.member, kind="fault", text=fault.words)
        folder.add_event(event)
        os.kill(pid, signal.SIGSTOP)
        undo.append(threading.Timer(fault.seconds, os.kill, (pid, signal.SIGCONT)))
        undo[0].start()

    try:
        return engines.run(asked, path, progress=stop)
    finally:
        for timer in undo:
            timer.cancel()


def _times(run: RunFolder) -> Row:
    """Of a run with one fault: how long until noticed and until as fast as before."""
    (fault,) = [event for event in run.events() if event.kind == "fault"]
    noticed = [e.time_seconds for e in run.events() if e.kind in (RESTART, "lost", "stall")]
    said = [event.text for event in run.events() if event.kind == "stall"]
    before = [
        step.seconds for step in run.steps("worker0")[2:] if step.end_seconds < fault.time_seconds
    ]
    score = drill.score(run, run)
    (cost,) = score.costs
    # With fewer servers, or links, steps may take longer for good: that is no recovery's cost.
    after = median(step.seconds for step in run.steps("worker0")[-LAST_STEPS:])
    back = _back(run, fault.time_seconds, 1.5 * max(median(before), after))
    detection = min((moment for moment in noticed if moment >= fault.time_seconds), default=None)
    row: Row = {
        "step_seconds": median(before),
        "step_seconds_after": after,
        "detection_seconds": None if detection is None else detection - fault.time_seconds,
        "back_seconds": back,
        "undone_steps": cost.undone_steps,
        "undone_samples": cost.undone_samples,
        "samples_not_seen": _not_seen(run),
    }
    if said:
        row |= {"told": said[0], "names_it": fault.member in said[0].partition(":")[2]}
    if back is not None and detection is not None:
        row["back_steps"] = (back - row["detection_seconds"]) / row["step_seconds"]
    return row


def _back(run: RunFolder, moment: float, most_seconds: float) -> float | None:
    """Until worker 0 begins the first of three steps in a row that are short enough."""
    after = [step for step in run.steps("worker0") if step.end_seconds > moment]
    for at in range(len(after) - drill.BACK_STEPS + 1):
        if all(step.seconds <= most_seconds for step in after[at : at + drill.BACK_STEPS]):
            return max(0.0, after[at].start_seconds - moment)
    return None


def _not_seen(run: RunFolder) -> int:
    """Samples that nobody trained on; all members together say how many."""
    return run.summary().samples_not_seen or 0


def _last_loss(run: RunFolder) -> float:
    losses = [step.loss for step in run.steps("worker0")[-LAST_STEPS:] if step.loss is not None]
    return mean(losses)


def peers(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    pythons = dict(text.split("=", 1) for text in given.peer_python)
    for name in given.peers or recovery_peers.PEERS:
        began = time.monotonic()
        row = recovery_peers.measure(name, pythons.get(name, sys.executable), folder / name)
        yield {"name": name, "engine": "peer", **row, "seconds": time.monotonic() - began}


PARTS = {"tunnel": in_tunnel, "here": here, "peers": peers}


def checks(row: Row) -> Iterator[Row]:
    """What a death may cost; starting all again takes what starting takes, and is only shown."""
    if row["engine"] == "peer" or "cannot" in row or "failed" in row:
        return
    value = row["detection_seconds"]
    if row["name"].endswith(HANGS):
        told = None if value is None else value / row["step_seconds"]
        yield _check(f"{row['name']}: told after, step times", told, HANG_STEPS)
        return
    name = f"{row['name']} ({row['engine']}): noticed after, s"
    yield _check(name, value, DETECTION_SECONDS)
    if row["name"].endswith("continue") and row["engine"] == "tunnel":
        most = SERVER_STEPS if "-server-" in row["name"] else WORKER_STEPS
        name = f"{row['name']}: as fast as before or at the end, step times after being noticed"
        yield _check(name, row.get("back_steps"), most)


def _check(name: str, value: float | None, target: float) -> Row:
    holds = value is not None and value < target
    return {"name": name, "value": value, "target": target, "holds": holds}


def table(result: dict[str, list[Row]]) -> str:
    lines = []
    for row in result["rows"]:
        facts = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in ("name", "engine")
        )
        lines.append(f"{row['name']:28} {row['engine']:7} {facts}")
    for check in result["checks"]:
        word = "holds" if check["holds"] else "FALLS SHORT"
        lines.append(f"{word:12} {check['name']}: {check['value']} (below {check['target']:g})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
