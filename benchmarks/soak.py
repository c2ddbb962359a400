"""A job that is hurt again and again: does it end, and with the weights of an undisturbed run?

    python benchmarks/soak.py --faults 50 --json
    python benchmarks/soak.py --faults 50 --on tunnel --only ring     # cables are pulled out too

For each architecture a run undisturbed and one with seeded kills and pauses of workers and servers,
each kill followed by a restart from the newest checkpoint; in the tunnel their cables are pulled
out for a while as well. Checked: every fault happened, every step was done, every loss is that of
the undisturbed run, and no process is left.
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

from paceline import engines, spec
from paceline.bench import drill

ARCHITECTURES = {
    "server": ("server", 2, 1),
    "colocated": ("server:placement=colocated", 2, 0),
    "ring": ("ring", 2, 0),
}
STEPS_BETWEEN = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--faults", type=int, default=50, help="of each architecture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on", choices=("here", "tunnel"), default="here")
    parser.add_argument("--only", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    given = parser.parse_args()
    rows = []
    for name in given.only:
        rows.append(soak(name, given.faults, given.seed, given.on))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {"rows": rows, "checks": [check(row) for row in rows]}
    if given.json:
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
