"""Many members, and many steps: does a job grow?

    python benchmarks/endurance.py --json
    python benchmarks/endurance.py --only many --workers 64

`long`: 10,000 steps of two workers (and a server), recorded like any run; `many`: 64 members in one
job. Memory, files and threads of all members together, shortly before the end beside those after a
tenth of the steps.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from paceline import spec
from paceline.record import RunFolder
from paceline.testing import run_members

ARCHITECTURES = {
    "server": ("server:transport=tcp", 2),
    "colocated": ("server:placement=colocated", 0),
    "ring": ("ring", 0),
    "average": ("average:every=4", 0),
}
GROWTH_FRACTION = 0.02
"""Of memory: allocators round, and records are written in blocks."""

TIMEOUT_SECONDS = 1500.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=("long", "many"), default=["long", "many"])
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=["server"])
    parser.add_argument("--members", type=int, default=64, help="of `many`")
    parser.add_argument("--long-steps", type=int, default=10_000)
    parser.add_argument("--many-steps", type=int, default=200)
    rows = []
    for row in measured(parser.parse_args()):
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    result = {"rows": rows, "checks": [check for row in rows for check in checks(row)]}
    print(json.dumps(result, indent=None if "--json" in sys.argv else 1))


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for kind in given.only:
        for name in given.architectures:
            text, servers = ARCHITECTURES[name]
            workers = 2 if kind == "long" else given.members - servers
            steps = given.long_steps if kind == "long" else given.many_steps
            yield {"name": f"{kind} {name}", **endure(text, workers, servers, steps)}


def endure(text: str, workers: int, servers: int, steps: int) -> dict[str, Any]:
    """One job; what its members used after a tenth of the steps and before the last ones."""
    architecture, began = spec.parse_architecture(text), time.monotonic()
    experiment = spec.Experiment(
        architecture=architecture, cluster=spec.Cluster(workers=workers, servers=servers)
    )
    with tempfile.TemporaryDirectory() as folder:
        found = run_members(
            train,
            steps,
            workers=workers,
            servers=servers,
            architecture=architecture,
            timeout_seconds=TIMEOUT_SECONDS,
            folder=RunFolder.create(Path(folder) / "run", experiment),
        )
    before, after, seconds = found[0]
    return {
        "members": workers + servers,
        "steps": steps,
        "seconds": time.monotonic() - began,
        "step_seconds": seconds / (looks_after(steps)[1] - looks_after(steps)[0]),
        "finished": len(found),
        **{what: [before[what], after[what]] for what in before},
    }


def looks_after(steps: int) -> tuple[int, int]:
    """How many steps are done when worker 0 looks; at the very end others may be gone already."""
    return steps // 10, steps - steps // 20


def train(session: Any, steps: int) -> tuple[dict[str, int], dict[str, int], float]:
    """Small steps, as fast as they go; worker 0 looks at all members meanwhile."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    session.distribute(model, optimizer)
    uses: list[dict[str, int]] = []
    then = seconds = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 30)).square().mean().backward()
        optimizer.step()
        if session.rank == 0 and step + 1 in looks_after(steps):
            uses.append(_used_by_all())
            then, seconds = time.monotonic(), time.monotonic() - then
    session.architecture.settle()
    if session.rank:
        return {}, {}, 0.0
    return uses[0], uses[1], seconds


def _used_by_all() -> dict[str, int]:
    """All members are children of one process, which forked them."""
    members = psutil.Process(psutil.Process().ppid()).children()
    found = {"bytes": 0, "files": 0, "threads": 0}
    for process in members:
        found["bytes"] += process.memory_full_info().uss
        found["files"] += process.num_fds()
        found["threads"] += process.num_threads()
    return found


def checks(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for what, most in (("bytes", GROWTH_FRACTION), ("files", 0.0), ("threads", 0.0)):
        before, after = row[what]
        grown = after / before - 1.0
        name = f"{row['name']}, {row['members']} members, {row['steps']} steps: {what} grown"
        yield {"name": name, "value": grown, "target": most, "holds": grown <= most}


if __name__ == "__main__":
    main()
