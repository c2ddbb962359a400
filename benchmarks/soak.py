"""A job that is hurt again and again: does it end, and with the weights of an undisturbed run?

    python benchmarks/soak.py --faults 50 --json
    python benchmarks/soak.py --faults 50 --on tunnel --only ring     # cables are pulled out too
    python benchmarks/soak.py --faults 20 --on-loss continue          # nobody is started again

For each architecture a run undisturbed and one with seeded kills and pauses of workers and servers,
each kill followed by a restart from the newest checkpoint; in the tunnel their cables are pulled
out for a while as well. Checked: every fault happened, every step was done, every loss is that of
the undisturbed run, and no process is left.

With `--on-loss continue` job after job loses one, two or three members for good, whichever, at any
step. Checked: each was killed; a job ends with every step done once by all who are left, or stops
with a sentence that names one who was killed; up to the first loss the losses are bit for bit those
of the undisturbed run, and to the end, with the weights, where that is promised: exactly where
servers alone were lost, but for rounding with `ring`.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from paceline import engines, record, spec
from paceline.bench import drill
from paceline.errors import FaultError, PacelineError
from paceline.record import RunFolder, checkpoints

ARCHITECTURES = {
    "server": ("server", 2, 1),
    "colocated": ("server:placement=colocated", 2, 0),
    "ring": ("ring", 2, 0),
}
STEPS_BETWEEN = 12

GOING_ON = {
    "servers": ("server:transport=tcp", 4, 2),
    "colocated": ("server:placement=colocated", 4, 0),
    "ring": ("ring", 4, 0),
    "average": ("average:every=4", 4, 0),
}
"""Architectures, workers and servers of the jobs that go on without who is lost."""

GOING_ON_STEPS, LAST_KILL = 300, 150
"""A fault may come some steps late, and must come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--faults", type=int, default=50, help="of each architecture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on", choices=("here", "tunnel"), default="here")
    parser.add_argument("--on-loss", choices=("stop", "continue"), default="stop")
    parser.add_argument("--only", nargs="+", choices=sorted({*ARCHITECTURES, *GOING_ON}))
    given = parser.parse_args()
    goes_on = given.on_loss == "continue"
    rows = []
    for name in given.only or (GOING_ON if goes_on else ARCHITECTURES):
        hurt = outlive if goes_on else soak
        rows.append(hurt(name, given.faults, given.seed, given.on))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {"rows": rows, "checks": [(outlived if goes_on else check)(row) for row in rows]}
    if given.json or goes_on:
        print(json.dumps(result))
        return
    for row, held in zip(rows, result["checks"], strict=True):
        print(f"{row['name']}: {row['faults']} faults, {row['restarts']} restarts, ", end="")
        print(f"{row['seconds']:.0f} s; loss differs by {held['value']:.1e}: {held['holds']}")


def soak(name: str, faults: int, seed: int, engine: str) -> dict[str, object]:
    """One architecture, undisturbed and disturbed."""
    began = time.monotonic()
    calm = spec.replace(experiment(name, faults), engine=engine)
    if engine == "tunnel":
        calm = spec.replace(calm, link="1gbit")
    hurt = disturbed(calm, faults, random.Random(f"{seed} {name}"))
    with tempfile.TemporaryDirectory() as folder:
        plain = engines.run(calm, Path(folder) / "plain")
        run = engines.run(hurt, Path(folder) / "hurt", progress=_progress(name, hurt))
        found = drill.score(plain, run)
        steps = [step.step for step in run.steps("worker0")]
    return {
        "name": name,
        "engine": engine,
        "faults": len(found.costs),
        "kinds": dict(Counter(cost.fault.split()[0] for cost in found.costs)),
        "asked": faults,
        "restarts": sum(cost.restarted for cost in found.costs),
        "loss_difference": found.loss_difference,
        "last_step": steps[-1] + 1 == hurt.workload.steps,
        "processes_left": len(psutil.Process().children(recursive=True)),
        "seconds": time.monotonic() - began,
    }


def experiment(name: str, faults: int) -> spec.Experiment:
    architecture, workers, servers = ARCHITECTURES[name]
    return spec.Experiment(
        architecture=spec.parse_architecture(architecture),
        cluster=spec.Cluster(workers=workers, servers=servers, restarts=faults),
        workload=spec.Workload(
            model="mnist-dnn",
            data="synthetic",
            global_batch=64,
            steps=STEPS_BETWEEN * (faults + 2),
            checkpoint_every=5,
        ),
    )


def disturbed(calm: spec.Experiment, faults: int, rng: random.Random) -> spec.Experiment:
    """Kills, pauses and, where there are cables, cuts of any member, one after the other."""
    workers, servers = calm.cluster.workers, calm.num_servers
    members = [f"worker{n}" for n in range(workers)] + [f"server{n}" for n in range(servers)]
    chosen = []
    for number in range(1, faults + 1):
        step, member = STEPS_BETWEEN * number + rng.randrange(6), rng.choice(members)
        kinds = ("pause", "cut") if calm.engine == "tunnel" else ("pause",)
        if rng.random() < 0.7:
            chosen.append(spec.Fault(member=member, at_step=step, kind="kill"))
        else:
            seconds, kind = rng.uniform(0.2, 2.0), rng.choice(kinds)
            chosen.append(spec.Fault(member=member, at_step=step, kind=kind, seconds=seconds))
    return drill.with_faults(calm, chosen)


def check(row: dict[str, object]) -> dict[str, object]:
    whole = row["faults"] == row["asked"] and row["last_step"] and not row["processes_left"]
    same = row["loss_difference"] == 0.0
    name = f"{row['name']}, {row['engine']}: every fault and step happened, same loss, nothing left"
    return {"name": name, "value": row["loss_difference"], "target": 0.0, "holds": whole and same}


def outlive(name: str, faults: int, seed: int, engine: str) -> dict[str, object]:
    """One architecture, job after job, until so many members were lost."""
    began, rng, trials = time.monotonic(), random.Random(f"{seed} {name}"), []
    text, workers, servers = GOING_ON[name]
    calm = spec.replace(
        experiment("ring", 1),
        architecture=spec.parse_architecture(text),
        cluster=spec.Cluster(workers=workers, servers=servers, on_loss="continue"),
        steps=GOING_ON_STEPS,
        checkpoint_every=GOING_ON_STEPS,
        engine=engine,
        **({"link": "1gbit"} if engine == "tunnel" else {}),
    )
    with tempfile.TemporaryDirectory() as folder:
        plain = engines.run(calm, Path(folder) / "plain")
        while faults:
            number = min(faults, rng.choice((1, 1, 1, 2, 3)))
            kills = _kills(workers, servers, number, rng)
            path = Path(folder) / f"{len(trials)}"
            trials.append(_trial(drill.with_faults(calm, kills), path, plain))
            print(json.dumps(trials[-1]), file=sys.stderr, flush=True)
            faults -= number
    left = len(psutil.Process().children(recursive=True))
    seconds = time.monotonic() - began
    return {"name": name, "trials": trials, "processes_left": left, "seconds": seconds}


def _kills(workers: int, servers: int, number: int, rng: random.Random) -> list[spec.Fault]:
    """Of different members; one worker and, where there are any, one server is left."""
    members = [f"worker{n}" for n in range(workers)] + [f"server{n}" for n in range(servers)]
    while True:
        chosen = rng.sample(members, number)
        if sum(name.startswith("server") for name in chosen) < max(servers, 1):
            break
    steps = sorted(rng.randrange(1, LAST_KILL) for _ in chosen)
    return [
        spec.Fault(member=member, at_step=step, kind="kill")
        for member, step in zip(chosen, steps, strict=True)
    ]


def _trial(asked: spec.Experiment, path: Path, plain: RunFolder) -> dict[str, object]:
    killed = [fault.member for fault in asked.faults]
    row: dict[str, object] = {"kills": [f"{one.member}@{one.at_step}" for one in asked.faults]}
    try:
        run = engines.run(asked, path, output=_show_launcher)
    except FaultError as error:
        return {**row, "holds": False, "ended": f"not all were killed: {error}"}
    except PacelineError as error:
        said = str(error).splitlines()[0]
        named = any(name in said for name in killed) and "Traceback" not in said
        return {**row, "holds": named, "ended": f"stopped: {said}"}
    left = [f"worker{n}" for n in range(asked.cluster.workers) if f"worker{n}" not in killed]
    whole = all(
        [step.step for step in run.steps(name)] == list(range(asked.workload.steps))
        for name in left
    )
    losses = drill.score(plain, run).loss_difference
    weights = _weights_difference(plain, run)
    promised = _promised(asked, killed)
    kept = promised is None or (losses is not None and max(losses, weights) <= promised)
    return {
        **row,
        "holds": whole and kept and _is_same_before(asked, plain, run),
        "ended": "every step done" if whole else "steps are missing",
        "loss_difference": losses,
        "weights_difference": weights,
        "promised": promised,
    }


def _show_launcher(member: str, stream: str, content: bytes) -> None:
    """What the launcher says: who was lost, and, of a job that stands still, who waits where."""
    if member == "paceline":
        sys.stderr.write(content.decode())
        sys.stderr.flush()


def _promised(asked: spec.Experiment, killed: list[str]) -> float | None:
    """How near losses and weights must be to the undisturbed run's; None: samples are missing."""
    if isinstance(asked.architecture, spec.Ring):
        return drill.SAME_LOSS
    return 0.0 if all(name.startswith("server") for name in killed) else None


def _is_same_before(asked: spec.Experiment, plain: RunFolder, run: RunFolder) -> bool:
    """Every loss of the steps before the first fault."""
    one, other = record.losses_of(plain), record.losses_of(run)
    steps = range(min(fault.at_step for fault in asked.faults))
    return all(one[step] == other[step] for step in steps)


def _weights_difference(plain: RunFolder, run: RunFolder) -> float:
    """The largest of any parameter's, relative to its largest weight, after the last step."""
    one, other = _weights(plain), _weights(run)
    assert one.keys() == other.keys()
    return max(
        float((weights - other[name]).abs().max() / weights.abs().max().clamp(min=1e-12))
        for name, weights in one.items()
    )


def _weights(run: RunFolder) -> dict[str, torch.Tensor]:
    found = checkpoints.choose(run.path)
    assert found.manifest.step == run.experiment().workload.steps, "the last step's are meant"
    content = torch.load(found.path.with_suffix(".pt"), weights_only=True)
    model: dict[str, torch.Tensor] = content["model"]
    return model


def outlived(row: dict[str, object]) -> dict[str, object]:
    trials = row["trials"]
    assert isinstance(trials, list)
    good = sum(trial["holds"] for trial in trials)
    name = f"{row['name']}: jobs that ended whole, or with a sentence that is true"
    holds = good == len(trials) and not row["processes_left"]
    return {"name": name, "value": good, "target": len(trials), "holds": holds}


def _progress(name: str, experiment: spec.Experiment) -> Callable[[int], None]:
    last = time.monotonic()

    def show(steps: int) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{name}: step {steps} of {experiment.workload.steps}", file=sys.stderr)

    return show


if __name__ == "__main__":
    main()
