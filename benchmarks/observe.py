"""What observing costs a job: plain runs beside observed ones, alternating, at a step of 20 ms.

The job is DDP over gloo on this machine, with sleeping layers, so that a step is mostly waiting and
what observing adds is not hidden behind a full machine. CPU seconds are counted besides wall time:
they do not depend on who else is at work here.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOB = Path(__file__).resolve().parent / "foreign" / "job.py"
WRAPPED = """
import resource, runpy, sys, time
sys.argv = sys.argv[1:]
observed = sys.argv[0] != "-"
out = sys.argv.pop(0)
import torch, torch.distributed
if observed:
    import paceline.observe
    paceline.observe(out)
from torch.optim.optimizer import register_optimizer_step_post_hook
moments = []
def note(*_):
    moments.append((time.monotonic(), time.process_time()))
register_optimizer_step_post_hook(note)
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
from statistics import median
steps = moments[20:]
wall = (steps[-1][0] - steps[0][0]) / (len(steps) - 1)
typical = median(b[0] - a[0] for a, b in zip(steps, steps[1:]))
cpu = (steps[-1][1] - steps[0][1]) / (len(steps) - 1)
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("FIGURES", wall, typical, cpu, rss, flush=True)
"""


def run(port: int, steps: int, out: str) -> dict[str, float]:
    """One job of two ranks; the mean figures of both."""
    command = [sys.executable, "-c", WRAPPED, out, str(JOB)]
    command += ["--kind", "ddp", "--steps", str(steps), "--step-ms", "18", "--width", "256"]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    base |= {"MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in ranks:
        output = process.communicate()[0]
        match = re.search(r"FIGURES (\S+) (\S+) (\S+) (\S+)", output)
        if match is None:
            raise SystemExit(f"a rank printed no figures:\n{output}")
        found.append([float(value) for value in match.groups()])
    wall, typical, cpu, rss = (statistics.fmean(column) for column in zip(*found, strict=True))
    return {"seconds": wall, "typical": typical, "cpu_seconds": cpu, "rss_bytes": rss}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.runs):
            for name in ("plain", "observed"):
                out = "-" if name == "plain" else f"{folder}/run{number}"
                figures = run(23_000 + os.getpid() % 20_000 + 2 * number, args.steps, out)
                rows.append({"run": number, "job": name, **figures})
                if not args.json:
                    print(rows[-1], flush=True)
    checks = judged(rows)
    if args.json:
        print(json.dumps({"rows": rows, "checks": checks}))
    else:
        for check in checks:
            print(check)


def judged(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Medians over the runs: wall and CPU time of a step, and memory."""

    def middle(job: str, what: str) -> float:
        return statistics.median(row[what] for row in rows if row["job"] == job)

    step = middle("plain", "seconds")
    wall = middle("observed", "seconds") / step - 1
    cpu = (middle("observed", "cpu_seconds") - middle("plain", "cpu_seconds")) / step
    memory = middle("observed", "rss_bytes") - middle("plain", "rss_bytes")
    return [
        {"name": "step longer by", "value": wall, "target": 0.01, "holds": wall <= 0.01},
        {"name": "CPU added, of a step", "value": cpu, "target": 0.01, "holds": cpu <= 0.01},
        {"name": "memory added", "value": memory, "target": 50e6, "holds": memory <= 50e6},
    ]


if __name__ == "__main__":
    main()
