"""Predictions beside measurements: settings of the tunnel, calibrated on a few, judged on the rest.

    python benchmarks/predict.py --json
    python benchmarks/predict.py --only ring-4 --gbit 1.5
    python benchmarks/predict.py --measured found.json --for 420
    python benchmarks/predict.py --measured found.json --for 0 --page docs/predict.md

Three settings calibrate (CALIBRATING) and are not judged. Every pair is shown. Emulated hosts
compute nothing, but moving their bytes is real work: each setting is slowed down (dilation) until
this machine has to move no more than `--gbit` a second in all. A round takes twenty minutes: with
`--measured` each run is kept in a file as it ends, and what is there already is not measured again.
The runs behind docs/predict.md are in benchmarks/measured/; the last line above writes its table.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pages import put

from paceline import engines, spec
from paceline.errors import PacelineError
from paceline.predict.answer import predict
from paceline.predict.calibration import Calibration, calibrate, load, save

CELLS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    # name: model, architecture, workers, servers, cluster
    "ring-2": ("resnet50", "ring", 2, 0, {}),
    "ring-4": ("resnet50", "ring", 4, 0, {}),
    "ring-6": ("resnet50", "ring", 6, 0, {}),
    "ring-4-half": ("resnet50", "ring", 4, 0, {"link": "500mbit"}),
    "ring-4-latency": ("resnet50", "ring", 4, 0, {"link": "1gbit,2ms"}),
    "server-1-1": ("resnet50", "server", 1, 1, {}),
    "server-2-1": ("resnet50", "server", 2, 1, {}),
    "server-4-1": ("resnet50", "server", 4, 1, {}),
    "server-4-2": ("resnet50", "server", 4, 2, {}),
    "server-4-2-half": ("resnet50", "server", 4, 2, {"link": "500mbit"}),
    "server-3-3": ("resnet50", "server", 3, 3, {}),
    "server-6-2": ("resnet50", "server", 6, 2, {}),
    "colocated-2": ("resnet50", "server:placement=colocated", 2, 0, {}),
    "colocated-4": ("resnet50", "server:placement=colocated", 4, 0, {}),
    "colocated-4-half": ("resnet50", "server:placement=colocated", 4, 0, {"link": "500mbit"}),
    "optimal-4-2": ("resnet50", "server:placement=optimal", 4, 2, {}),
    "async-4-2": ("resnet50", "server:mode=async", 4, 2, {}),
    "straggler-sync": ("resnet50", "server", 4, 2, {"slow": 2.0}),
    "straggler-async": ("resnet50", "server:mode=async", 4, 2, {"slow": 2.0}),
    "average-4": ("resnet50", "average:every=4", 4, 0, {}),
    "hybrid-4": ("resnet50", "hybrid", 4, 0, {"each": 2}),
    "alexnet-ring-4": ("alexnet", "ring", 4, 0, {}),
    "alexnet-server-4-2": ("alexnet", "server", 4, 2, {}),
    "alexnet-colocated-4": ("alexnet", "server:placement=colocated", 4, 0, {}),
    "googlenet-ring-4": ("googlenet", "ring", 4, 0, {}),
    "googlenet-server-4-1": ("googlenet", "server", 4, 1, {}),
    "googlenet-colocated-6": ("googlenet", "server:placement=colocated", 6, 0, {}),
    "googlenet-server-4-1-latency": ("googlenet", "server", 4, 1, {"link": "1gbit,2ms"}),
    "colocated-4-short-latency": (
        "resnet50",
        "server:placement=colocated",
        4,
        0,
        {"link": "1gbit,500us"},
    ),
    "googlenet-server-4-2-long-latency": ("googlenet", "server", 4, 2, {"link": "1gbit,5ms"}),
    "alexnet-ring-4-long-latency": ("alexnet", "ring", 4, 0, {"link": "1gbit,5ms"}),
    "fp16-4-1": ("resnet50", "server:compression=fp16", 4, 1, {}),
    "int8-4-1": ("resnet50", "server:compression=int8", 4, 1, {}),
    "topk-4-1": ("resnet50", "server:compression=topk", 4, 1, {}),
    "fp16-4-2": ("resnet50", "server:compression=fp16", 4, 2, {}),
    "int8-4-2": ("resnet50", "server:compression=int8", 4, 2, {}),
    "topk-4-2": ("resnet50", "server:compression=topk", 4, 2, {}),
    "quorum-4-2": ("resnet50", "server:mode=quorum", 4, 2, {}),
    "quorum-4-4": ("resnet50", "server:mode=quorum", 4, 4, {}),
    "straggler-quorum": ("resnet50", "server:mode=quorum", 4, 2, {"slow": 2.0}),
    "straggler-quorum-4-4": ("resnet50", "server:mode=quorum", 4, 4, {"slow": 3.0}),
    "straggler-async-4-4": ("resnet50", "server:mode=async", 4, 4, {"slow": 3.0}),
    "bounded-4-2": ("resnet50", "server:mode=bounded", 4, 2, {}),
    "straggler-bounded-4-4": (
        "resnet50",
        "server:mode=bounded",
        4,
        4,
        {"slow": 3.0, "warmup": 10},
    ),
    "average-3": ("resnet50", "average:every=2", 3, 0, {}),
    "hybrid-6": ("resnet50", "hybrid", 6, 0, {"each": 3}),
    "worker-updates-4-2": ("resnet50", "server:update=worker", 4, 2, {}),
    "worker-updates-4-4": ("resnet50", "server:update=worker", 4, 4, {}),
    "worker-updates-colocated-4": (
        "resnet50",
        "server:placement=colocated,update=worker",
        4,
        0,
        {},
    ),
    "hybrid-server-4-2": ("resnet50", "hybrid:between=server", 4, 2, {"each": 2}),
    "clip-4-2": ("resnet50", "server", 4, 2, {"clip": 1.0}),
    "clip-4-4": ("resnet50", "server", 4, 4, {"clip": 1.0}),
    "ring-4-slow-cable": ("resnet50", "ring", 4, 0, {"slow_cable": "400mbit"}),
    "colocated-4-slow-cable": (
        "resnet50",
        "server:placement=colocated",
        4,
        0,
        {"slow_cable": "400mbit"},
    ),
}
CALIBRATING = ("ring-4", "server-4-2", "colocated-4")
LINK, DEVICE, BATCH, WARMUP = "1gbit", "k80", 32, 3
MEDIAN, WORST, INSIDE = 0.05, 0.15, 0.90


def main() -> None:
    options = parse()
    wanted = [name for name in CELLS if not options.only or name in options.only.split(",")]
    found = measured(wanted, options)
    rows: list[dict[str, Any]] = [
        {"name": name, "seconds": statistics.median(found[name]), "runs": found[name]}
        for name in wanted
        if found.get(name)
    ]
    calibration = calibrated(rows, options.calibration)
    rows = [judged(row, calibration) for row in rows]
    answer = {"calibration": calibration.constants, "rows": rows, "checks": checks(rows)}
    if options.page:
        put(options.page, "pairs", page(answer))
    print(json.dumps(answer, indent=1) if options.json else page(answer))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="settings, comma-separated", default="")
    parser.add_argument("--steps", type=int, default=8, help="that are counted, after the first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gbit", type=float, default=3.0, help="a second, on all links together")
    parser.add_argument(
        "--measured", type=Path, help="runs are kept in this file, and not repeated"
    )
    parser.add_argument(
        "--for", type=float, default=math.inf, dest="seconds", help="begin no run later"
    )
    parser.add_argument("--calibration", type=Path, help="use this file, or write it")
    parser.add_argument("--page", type=Path, help="put every pair into this page")
    return parser.parse_args()


def experiment_of(name: str, steps: int = 8) -> spec.Experiment:
    """One setting, for the tunnel and for the predictor alike; so many steps are counted."""
    model, architecture, workers, servers, extra = CELLS[name]
    each, warmup = extra.get("each", 1), extra.get("warmup", WARMUP)
    hosts: list[dict[str, Any]] = [{"count": workers // each, "workers": each}]
    if "slow" in extra:
        hosts = [{"count": workers - 1}, {"slowdown": extra["slow"]}]
    if "slow_cable" in extra:
        hosts = [{"count": workers - 1}, {"link": extra["slow_cable"]}]
    if servers:
        hosts.append({"count": servers, "workers": 0, "servers": 1})
    return spec.from_tables(
        {
            "name": name,
            "engine": "tunnel",
            "workload": {
                "model": model,
                "data": "synthetic",
                "batch": BATCH,
                "steps": warmup + steps,
                "clip_norm": extra.get("clip", 0.0),
            },
            "architecture": architecture,
            "cluster": {
                "workers": workers,
                "servers": servers,
                "link": extra.get("link", LINK),
                "device": DEVICE,
                "hosts": hosts,
            },
            "measurement": {"warmup_steps": warmup},
        },
        name,
    )


def measured(wanted: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step in each run of each setting: all settings once, then all again."""
    began, kept = time.monotonic(), options.measured
    found: dict[str, list[float]] = {}
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
    rounds = [(repeat, name) for repeat in range(options.repeats) for name in wanted]
    for repeat, name in rounds:
        if len(found.get(name, [])) > repeat or time.monotonic() - began > options.seconds:
            continue
        seconds = measure(name, options)
        if seconds is None:
            continue
        found.setdefault(name, []).append(seconds)
        print(f"{name}: {seconds:.3f} s a step", file=sys.stderr, flush=True)
        if kept is not None:
            kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def measure(name: str, options: argparse.Namespace) -> float | None:
    """Seconds of a step in one run, or None where the tunnel refused twice: a busy machine."""
    experiment = slowed(experiment_of(name, options.steps), options.gbit)
    rate = rate_in_tunnel(experiment) or rate_in_tunnel(experiment)
    return None if rate is None else BATCH * experiment.cluster.workers / rate


def slowed(experiment: spec.Experiment, most_gbit: float) -> spec.Experiment:
    """Dilated until all links together carry no more than this in a second.

    A server's link is full both ways, and so is that of everyone in a ring or with a seat; who
    only pushes to servers sends what they receive.
    """
    cluster, servers = experiment.cluster, experiment.num_servers
    link = spec.parse_link(cluster.link, "[cluster]")
    kind = experiment.architecture
    dedicated = isinstance(kind, spec.Server) and kind.placement == "dedicated" and servers > 0
    full = 2 * servers if dedicated else cluster.workers + servers
    gbit = full * link.bandwidth_bits_per_second / 1e9
    return spec.replace(experiment, dilation=max(1.0, gbit / most_gbit))


def rate_in_tunnel(experiment: spec.Experiment) -> float | None:
    """Samples per second of one run; None where the tunnel refused."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            folder = engines.run(experiment, Path(temporary) / "run")
        except PacelineError as error:
            print(f"{experiment.name}: {error}", file=sys.stderr, flush=True)
            return None
        summary = folder.summary()
    cores = sum(m.cpu_fraction for m in summary.members if isinstance(m.cpu_fraction, float))
    took = f"{time.monotonic() - began:.0f} s at dilation {experiment.cluster.dilation:.2f}"
    print(f"{experiment.name}: {took}, {cores:.2f} cores", file=sys.stderr, flush=True)
    rate = summary.samples_per_second
    return rate if isinstance(rate, float) else None


def rate_of(row: dict[str, Any]) -> float:
    return float(BATCH * CELLS[row["name"]][2] / row["seconds"])


def calibrated(rows: list[dict[str, Any]], path: Path | None) -> Calibration:
    """From the calibrating settings that were measured, or as kept."""
    if path is not None and path.exists():
        return load(path)
    own = [row for row in rows if row["name"] in CALIBRATING]
    found = calibrate([(experiment_of(row["name"]), rate_of(row)) for row in own])
    if path is not None:
        save(found, path)
    return found


def judged(row: dict[str, Any], calibration: Calibration) -> dict[str, Any]:
    """The measurement with its prediction beside it."""
    found = predict(experiment_of(row["name"]), calibration.stack())
    samples = BATCH * CELLS[row["name"]][2]
    seconds = samples / found.samples_per_second
    return {
        **row,
        "predicted_seconds": seconds,
        "low_seconds": samples / found.high,
        "high_seconds": samples / found.low,
        "error_fraction": seconds / row["seconds"] - 1,
        "calibrating": row["name"] in CALIBRATING,
        "limited_by": found.limit,
    }


def checks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The design's lines, over settings that calibrated nothing."""
    others = [row for row in rows if not row["calibrating"]]
    if not others:
        return []
    errors = [abs(row["error_fraction"]) for row in others]
    median, worst = statistics.median(errors), max(errors)
    share = sum(map(inside, others)) / len(others)
    return [
        {"name": "median error", "value": median, "target": MEDIAN, "holds": median <= MEDIAN},
        {"name": "worst error", "value": worst, "target": WORST, "holds": worst <= WORST},
        {"name": "inside intervals", "value": share, "target": INSIDE, "holds": share >= INSIDE},
    ]


def page(answer: dict[str, Any]) -> str:
    """Every pair, as a page."""
    lines = [
        "| setting | measured s | runs | predicted s | 90 % between | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in answer["rows"]:
        mark = " (calibrates)" if row["calibrating"] else "" if inside(row) else " (outside)"
        between = f"{row['low_seconds']:.3f} and {row['high_seconds']:.3f}"
        values = f"{row['predicted_seconds']:.3f} | {between} | {row['error_fraction']:+.1%}"
        measured = f"{row['seconds']:.3f} | {len(row['runs'])}"
        lines.append(f"| `{row['name']}`{mark} | {measured} | {values} |")
    others = sum(not row["calibrating"] for row in answer["rows"])
    found = [f"{c['name']} {c['value']:.1%} (aim {c['target']:.0%})" for c in answer["checks"]]
    constants = ", ".join(f"`{name}` {value:.4g}" for name, value in answer["calibration"].items())
    lines += ["", f"Of the {others} that calibrated nothing: {', '.join(found)}.", ""]
    lines += [f"Constants as calibrated: {constants}."]
    return "\n".join(lines) + "\n"


def inside(row: dict[str, Any]) -> bool:
    """Whether the measurement lies in the interval."""
    return bool(row["low_seconds"] <= row["seconds"] <= row["high_seconds"])


if __name__ == "__main__":
    main()
