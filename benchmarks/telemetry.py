"""What measuring costs: the plain loop beside the same loop under `distribute`, recorded.

    python benchmarks/telemetry.py --json

Both train in one process, step by step in turn, so that noise hits both alike. Compared are CPU
seconds of one thread: what other processes take from this one is no cost of measuring. Wall seconds
stand beside them. The sampling thread's share is measured on its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from paceline import models, spec
from paceline.builtin import optimizers
from paceline.record import RunFolder
from paceline.session.session import Session
from paceline.session.start import init

TARGET_FRACTION = 0.01
SETTINGS = {"tutorial-cnn": ((3, 32, 32), 32), "resnet50": ((3, 32, 32), 32)}
WARMUP_PAIRS = 5
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--pairs", type=int, default=100, help="steps of each loop")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        session = start(Path(folder) / "run")
        rows = [measure(given.only[0], session, given.pairs), sampler(session)]
        session.close()
    for name in given.only[1:]:  # a process distributes one model
        rows += _elsewhere(name, given.pairs)
    result = {"rows": rows, "checks": checks(rows)}
    print(json.dumps(result) if given.json else table(result))


def start(path: Path) -> Session:
    """Be the one worker of a recorded job."""
    torch.set_num_threads(1)
    script = spec.Workload(script=spec.Script(path="train.py"))  # whose losses are looked for
    RunFolder.create(path, spec.Experiment(architecture=spec.Single(), workload=script))
    os.environ["PACELINE_RUN"] = str(path)
    return init()


def measure(name: str, session: Session, pairs: int) -> dict[str, object]:
    """One step of each loop in turn, the first of each pair alternating."""
    loops = {"plain": plain_loop(name), "distributed": distributed_loop(name, session)}
    cpu: dict[str, list[float]] = {key: [] for key in loops}
    wall: dict[str, list[float]] = {key: [] for key in loops}
    for pair in range(-WARMUP_PAIRS, pairs):
        for key in sorted(loops, reverse=bool(pair % 2)):
            seconds = timed(loops[key])
            if pair >= 0:
                cpu[key].append(seconds[0])
                wall[key].append(seconds[1])
    return {
        "model": name,
        "what": "distribute",
        "seconds": statistics.median(wall["plain"]),
        "overhead_fraction": quiet(cpu["distributed"]) / quiet(cpu["plain"]) - 1,
        "overhead_fraction_wall": quiet(wall["distributed"]) / quiet(wall["plain"]) - 1,
        "pairs": pairs,
    }


def quiet(seconds: list[float]) -> float:
    """The first quartile: a step that others disturbed took longer, never less."""
    return statistics.quantiles(seconds, n=4)[0]


def timed(step: Step) -> tuple[float, float]:
    """CPU and wall seconds of one step."""
    cpu, wall = time.thread_time(), time.perf_counter()
    step()
    return time.thread_time() - cpu, time.perf_counter() - wall


def plain_loop(name: str) -> Step:
    model, optimizer, inputs, targets = build(name)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def distributed_loop(name: str, session: Session) -> Step:
    """The same lines, with what the built-in loop adds: phases, the loss, a record."""
    model, optimizer, inputs, targets = build(name)
    model, optimizer = session.distribute(model, optimizer)

    def step() -> None:
        session.clock.enter("input")
        session.clock.enter("other")
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        session.report_loss(loss)
        optimizer.step()

    return step


def build(
    name: str,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    shape, batch = SETTINGS[name]
    torch.manual_seed(0)
    model = models.build(name, input_shape=shape).to(memory_format=torch.channels_last)
    optimizer = optimizers.build(spec.Optimizer(learning_rate=1e-3), model.parameters())
    inputs = torch.randn(batch, *shape).to(memory_format=torch.channels_last)
    return model.train(), optimizer, inputs, torch.randint(10, (batch,))


def sampler(session: Session) -> dict[str, object]:
    """CPU seconds of one sample of CPU, memory, bytes and packets; one is taken every second."""
    assert session.recorder is not None
    began, count = time.thread_time(), 50
    for _ in range(count):
        session.recorder._sample()
    seconds = (time.thread_time() - began) / count
    return {"what": "sampling", "seconds": seconds, "overhead_fraction": seconds / 1.0}


def checks(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    sampling = sum(float(r["overhead_fraction"]) for r in rows if r["what"] == "sampling")
    found = []
    for row in rows:
        if row["what"] == "distribute":
            value = float(row["overhead_fraction"]) + sampling  # type: ignore[arg-type]
            name = f"cost of distribute and measuring, one worker, {row['model']}"
            holds = value <= TARGET_FRACTION
            target = f"<= {TARGET_FRACTION}"
            found.append({"name": name, "value": value, "target": target, "holds": holds})
    return found


def _elsewhere(name: str, pairs: int) -> list[dict[str, object]]:
    command = [sys.executable, __file__, "--json", "--only", name]
    command += ["--pairs", str(pairs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    found: list[dict[str, object]] = json.loads(done.stdout)["rows"]
    return [row for row in found if row["what"] == "distribute"]


def table(result: dict[str, list[dict[str, object]]]) -> str:
    lines = [json.dumps(row) for row in result["rows"]]
    for check in result["checks"]:
        verdict = "holds" if check["holds"] else "FAILS"
        lines.append(f"{verdict}  {check['name']}: {check['value']:.4f} ({check['target']})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
