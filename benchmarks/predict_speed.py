"""How long predictions take: large clusters, and one whose hosts are not alike.

    python benchmarks/predict_speed.py --json

Seconds are those of one core, so that a busy machine tells the same. One simulation each; an
interval takes some more.
"""

import argparse
import json
import time
from typing import Any

from paceline import spec
from paceline.predict.answer import simulate

ROWS: dict[str, tuple[str, int, int, float]] = {
    # name: architecture, workers, servers, seconds to reach
    "ring, 1,024 workers": ("ring", 1024, 0, 1.0),
    "servers, 1,024 workers": ("server", 1024, 256, 1.0),
    "colocated, 1,024 workers": ("server:placement=colocated", 1024, 0, 1.0),
    "ring, 100,000 workers": ("ring", 100_000, 0, 5.0),
    "servers, 100,000 workers": ("server", 100_000, 20_000, 5.0),
    "uneven, 64 workers": ("server", 64, 8, 10.0),
    "uneven, 64 workers, async": ("server:mode=async", 64, 8, 10.0),
}
KINDS = 16
"""Of hosts in the uneven cluster: each kind has a device and a cable of its own speed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    simulate(experiment_of("ring, 1,024 workers"))  # profiles are read once
    rows = [row(name) for name in ROWS]
    if options.json:
        print(json.dumps({"rows": rows, "checks": [check(found) for found in rows]}, indent=1))
        return
    for found in rows:
        print(f"{found['name']:28} {found['seconds']:6.2f} s of {found['reach_seconds']:g} s")


def experiment_of(name: str) -> spec.Experiment:
    architecture, workers, servers, _ = ROWS[name]
    hosts: list[dict[str, Any]] = []
    if name.startswith("uneven"):
        hosts = [
            {
                "count": workers // KINDS,
                "slowdown": 1 + 0.05 * kind,
                "link": f"{1 + kind % 4}gbit",
            }
            for kind in range(KINDS)
        ]
        hosts.append({"count": servers, "workers": 0, "servers": 1, "link": "10gbit"})
    return spec.from_tables(
        {
            "name": "speed",
            "engine": "predict",
            "workload": {"model": "resnet50", "data": "synthetic", "batch": 32},
            "architecture": architecture,
            "cluster": {
                "workers": workers,
                "servers": servers,
                "device": "v100",
                "link": "10gbit",
                "hosts": hosts,
            },
        },
        name,
    )


def row(name: str) -> dict[str, Any]:
    experiment = experiment_of(name)
    began = time.process_time()
    found = simulate(experiment)
    seconds = time.process_time() - began
    return {
        "name": name,
        "seconds": seconds,
        "reach_seconds": ROWS[name][3],
        "step_seconds": found.step_seconds,
        "events": found.events,
    }


def check(found: dict[str, Any]) -> dict[str, Any]:
    reach = found["reach_seconds"]
    return {
        "name": f"{found['name']}: seconds of one core",
        "value": found["seconds"],
        "target": reach,
        "holds": found["seconds"] <= reach,
    }


if __name__ == "__main__":
    main()
