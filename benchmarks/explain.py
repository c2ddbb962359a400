"""The laboratory of causes: plant each one, explain the run, follow the advice, measure again.

    python benchmarks/explain.py --json
    python benchmarks/explain.py --only straggler slow-cable-ring --keep runs/laboratory
    python benchmarks/explain.py --keep runs/laboratory --minutes 7

A situation is a file in tests/explain/situations: an experiment, the cause that is planted in it,
and between what the best advice gives when it is followed. The run and the one that follows the
advice alternate, so that the machine's noise hits both alike. Situations that need what is not here
(rights for emulated hosts, a data set) are left out, and said to be.

With `--keep` a run that is already there is explained and not run again, so the laboratory can be
worked through in pieces, and a change to `explain` is judged by the same runs. Only what its new
advice asks for is run. `--pack` puts the records into tests/explain/recorded, where a test judges
them again.
"""

import argparse
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline import engines, spec
from paceline.errors import MemberError, PacelineError
from paceline.explain import Action, Explanation, explain
from paceline.record import RunFolder, open_folder
from paceline.tunnel.namespaces import missing_rights

ROOT = Path(__file__).resolve().parent.parent
SITUATIONS = ROOT / "tests" / "explain" / "situations"
RECORDED = ROOT / "tests" / "explain" / "recorded"
RIGHT_FRACTION, INSIDE_FRACTION = 0.9, 0.8
BUSY = "while True: pass"


class Situation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planted cause."""

    name: str
    cause: str
    """The name `explain` must give first; empty for a healthy run."""

    experiment: dict[str, Any]
    says: str = ""
    """Words that its verdict must have, such as who it was."""

    also: tuple[str, ...] = ()
    """Names that are as true, on a machine that is busy or slower."""

    gain: tuple[float, float] | None = None
    """Between what following the first advice gives, as a share of the throughput before."""

    script: str = ""
    """What workers run in place of a built-in workload, beside the situation's file."""

    workers_per_core: int = 0
    """In place of a number of workers, for what depends on this machine's cores."""

    busy_processes_per_core: int = 0
    """Processes of somebody else's that keep cores busy meanwhile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", default=[], help="names of situations")
    parser.add_argument("--list", action="store_true", help="read every situation, run none")
    parser.add_argument("--repeats", type=int, default=1, help="runs before and after, in turn")
    parser.add_argument("--keep", type=Path, help="folder for the runs; else they are removed")
    parser.add_argument("--minutes", type=float, help="begin no situation after so long")
    parser.add_argument("--pack", action="store_true", help="archive the runs that were judged")
    parser.add_argument("--page", type=Path, help="write the scoreboard there, as Markdown")
    parser.add_argument(
        "--note", default="", help="a sentence for the page: where, under what load"
    )
    parser.add_argument("--recorded", action="store_true", help="judge what is kept, run nothing")
    given = parser.parse_args()
    found = [s for s in situations() if not given.only or s.name in given.only]
    if given.list:
        shown = [{"name": s.name, "cause": s.cause, "needs": needs(s)} for s in found]
        print(json.dumps({"rows": shown, "checks": []}, indent=None if given.json else 1))
        return
    place = given.keep or Path(tempfile.mkdtemp())
    if given.recorded:
        found = [s for s in found if (place / s.name / "before-0").exists()]
    end = math.inf if given.minutes is None else time.monotonic() + 60 * given.minutes
    rows = []
    for situation in found:
        late = given.recorded or time.monotonic() > end
        row = judge(situation, place / situation.name, given.repeats, may_run=not late)
        rows += [row] if row is not None else []
    if given.pack:
        for row in rows:
            pack(place, str(row["situation"]))
    if given.keep is None:
        shutil.rmtree(place)
    result = {"rows": rows, "checks": checks(rows)}
    if given.page:
        from scoreboard import page  # beside this script

        given.page.write_text(page(result, given.note))
    print(json.dumps(result) if given.json else table(result))


def situations() -> list[Situation]:
    """Every file of the laboratory."""
    return [
        msgspec.convert({"name": file.stem, **tomllib.loads(file.read_text())}, Situation)
        for file in sorted(SITUATIONS.glob("*.toml"))
    ]


def experiment_of(situation: Situation) -> spec.Experiment:
    """The situation's experiment on this machine."""
    tables = json.loads(json.dumps(situation.experiment))
    cluster = tables.setdefault("cluster", {})
    if cluster.get("device", "").endswith(".json"):
        cluster["device"] = str(SITUATIONS / cluster["device"])
    if situation.workers_per_core:
        cluster["workers"] = situation.workers_per_core * len(os.sched_getaffinity(0))
    if situation.script:
        file, *arguments = situation.script.split()
        script = {"path": str(SITUATIONS / file), "arguments": arguments}
        tables.setdefault("workload", {})["script"] = script
    return spec.from_tables(tables, situation.name)


def needs(situation: Situation) -> str:
    """What a situation lacks here; empty when it can be run."""
    experiment = experiment_of(situation)
    missing = missing_rights() if experiment.engine == "tunnel" else []
    data_dir = experiment.workload.data_dir
    if data_dir and not Path(data_dir).exists():
        missing = [*missing, data_dir]
    return ", ".join(missing)


def judge(
    situation: Situation, place: Path, repeats: int, *, may_run: bool = True
) -> dict[str, object] | None:
    """Run a situation and what its first advice makes of it; None where it cannot be run here."""
    lacking = needs(situation) if may_run else ""
    if lacking:
        print(f"{situation.name}: left out, {lacking} missing", file=sys.stderr)
        return None
    try:
        return _judge(Laboratory(situation, place, may_run), repeats)
    except NotKeptError:
        print(f"{situation.name}: left for later", file=sys.stderr)
        return None
    except PacelineError as error:  # such as links that this machine cannot carry now
        print(f"{situation.name}: left out, {error}", file=sys.stderr)
        return None


def _judge(laboratory: "Laboratory", repeats: int) -> dict[str, object]:
    began = time.monotonic()
    situation, experiment = laboratory.situation, laboratory.experiment()
    before = [laboratory.explained(experiment, "before-0")]
    found = before[0]
    advice = laboratory.followed(found)
    after: list[Explanation] = []
    if advice is not None and situation.gain is not None:
        changed = follow(experiment, advice)
        for number in range(repeats):
            after.append(laboratory.explained(changed, f"after-{number}"))
            if number + 1 < repeats:
                before.append(laboratory.explained(experiment, f"before-{number + 1}"))
    row = _row(situation, found, advice, before, after)
    row["seconds"] = time.monotonic() - began
    print(f"{situation.name}: {_line(row)}", file=sys.stderr)
    return row


def follow(experiment: spec.Experiment, advice: Action) -> spec.Experiment:
    """The experiment as the advice would have it."""
    change = dict(advice.change)
    if isinstance(change.get("architecture"), str):
        change["architecture"] = spec.parse_architecture(str(change["architecture"]))
    if isinstance(change.get("optimizer"), dict):
        optimizer = msgspec.to_builtins(experiment.workload.optimizer)
        change["optimizer"] = {**optimizer, **change["optimizer"]}  # type: ignore[dict-item]
    return spec.replace(experiment, **change)


class NotKeptError(Exception):
    """A run that is not there and may not be made."""


@dataclass(frozen=True)
class Laboratory:
    """Where the runs of a situation are kept."""

    situation: Situation
    place: Path
    may_run: bool

    def experiment(self) -> spec.Experiment:
        """The question; where nothing may be run, that of the run that was recorded elsewhere."""
        path = self.place / "before-0"
        if self.may_run or not path.exists():
            return experiment_of(self.situation)
        return open_folder(path).experiment()

    def followed(self, found: Explanation) -> Action | None:
        """The advice to follow: the one that was, where its run is kept; else the first."""
        possible = [a for a in found.actions if a.change and a.gain is not None]
        kept = self.place / "after-0" / "experiment.toml"
        if not self.may_run and kept.exists():
            asked = kept.read_text()
            changed = [(a, spec.to_toml(follow(self.experiment(), a))) for a in possible]
            return next((action for action, toml in changed if toml == asked), None)
        return next(iter(possible), None)

    def explained(self, experiment: spec.Experiment, name: str) -> Explanation:
        """Explain the run that answers `experiment`; it is made where it is not there yet."""
        path = self.place / name
        if _is_kept(experiment, path):
            return explain(open_folder(path))
        if not self.may_run:
            raise NotKeptError
        return explain(self._run(experiment, path))

    def _run(self, experiment: spec.Experiment, path: Path) -> RunFolder:
        if path.exists():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _busy(self.situation.busy_processes_per_core * len(os.sched_getaffinity(0))):
            try:
                return engines.run(experiment, path)
            except MemberError:
                return open_folder(path)  # planted failures fail; the record says so


def _is_kept(experiment: spec.Experiment, path: Path) -> bool:
    """Whether a run is there that ended and asked the same."""
    if not (path / "run.json").exists():
        return False
    folder = open_folder(path)
    ended = folder.summary().status in ("finished", "failed")
    return ended and (path / "experiment.toml").read_text() == spec.to_toml(experiment)


HERE = "@situations@"
"""Stands for this folder of situations in an archive."""

READ = ("experiment.toml", "machine.json", "events.jsonl", "run.json", "members/*")
"""What `explain` reads of a run."""


def pack(place: Path, name: str) -> None:
    """Archive the records of a situation, without this machine's paths in them."""
    RECORDED.mkdir(exist_ok=True)
    with tarfile.open(RECORDED / f"{name}.tar.xz", "w:xz") as archive:
        for run in sorted((place / name).iterdir()):
            for file in sorted(file for pattern in READ for file in run.glob(pattern)):
                text = file.read_text().replace(str(SITUATIONS), HERE).replace(str(ROOT), "")
                entry = tarfile.TarInfo(str(file.relative_to(place)))
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))


def unpack(name: str, place: Path) -> None:
    """Lay the archived records of a situation where `--keep` would have them."""
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(place, filter="data")
    for file in (place / name).glob("*/experiment.toml"):
        file.write_text(file.read_text().replace(HERE, str(SITUATIONS)))


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Somebody else's processes, gone afterwards."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _row(
    situation: Situation,
    found: Explanation,
    advice: Action | None,
    before: list[Explanation],
    after: list[Explanation],
) -> dict[str, object]:
    first = found.causes[0].name if found.causes else ""
    row: dict[str, object] = {
        "situation": situation.name,
        "planted": situation.cause,
        "named": [cause.name for cause in found.causes],
        "right": (first == situation.cause or first in situation.also)
        and situation.says.lower() in found.verdict.lower(),
        "verdict": found.verdict,
    }
    if advice is not None and advice.gain is not None and after:
        rates = [statistics.median(map(_rate, runs)) for runs in (before, after)]
        measured, gain = rates[1] / rates[0] - 1, advice.gain
        row |= {
            "advice": advice.text,
            "claimed": [gain.low, gain.high],
            "expected": list(situation.gain or ()),
            "measured": measured,
            "inside": gain.low <= measured <= gain.high,
            "sign": (measured > 0) == (gain.middle > 0),
        }
    return row


def _rate(found: Explanation) -> float:
    return found.samples_per_second_with_pauses


def checks(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    """How often verdicts and promises were true."""
    if not rows:
        return []
    promised = [row for row in rows if "measured" in row]
    right = sum(row["right"] for row in rows) / len(rows)
    found = [_check("verdicts right", right, RIGHT_FRACTION)]
    if promised:
        inside = sum(row["inside"] for row in promised) / len(promised)
        sign = sum(row["sign"] for row in promised) / len(promised)
        found += [
            _check("gains inside their range", inside, INSIDE_FRACTION),
            _check("gains with the right sign", sign, 1.0),
        ]
    return found


def _check(name: str, value: float, target: float) -> dict[str, object]:
    return {"name": name, "value": value, "target": target, "holds": value >= target}


def _line(row: dict[str, Any]) -> str:
    mark = "right" if row["right"] else f"WRONG, planted {row['planted'] or 'nothing'}"
    mark += "" if row["right"] else f" ({row['verdict']})"
    text = f"{mark}: {', '.join(row['named']) or 'healthy'}"
    if "measured" in row:
        low, high = row["claimed"]
        inside = "inside" if row["inside"] else "OUTSIDE"
        text += f"; claimed {low:+.0%} to {high:+.0%}, measured {row['measured']:+.0%}, {inside}"
    return text


def table(result: dict[str, Any]) -> str:
    lines = [f"{row['situation']:<24} {_line(row)}" for row in result["rows"]]
    lines += [f"{c['name']}: {c['value']:.0%} (target {c['target']:.0%})" for c in result["checks"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
