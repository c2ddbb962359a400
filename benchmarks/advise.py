"""Advice tested by running it: is the first choice of `advise` near the best of a measured grid?

    python benchmarks/advise.py --json
    python benchmarks/advise.py --measured advised.json --for 300
    python benchmarks/advise.py --pairs found.json    # what predict.py measured of the same
    python benchmarks/advise.py --on predict          # the benchmark itself, in seconds
    python benchmarks/advise.py --measured advised.json --for 0 --page docs/predict.md

For each setting (a model, a link, a number of hosts) the grid is everything that `advise` considers
and that trains like one worker; what is predicted at less than 80 % of the best and is not among
the first three is not run. The advice holds where its first choice gives at least 95 % of the best.
Runs are kept with `--measured` as in predict.py and slowed down as there: a round takes 20 minutes.
"""

import argparse
import json
import math
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import predict as pairs
from pages import put

from paceline import spec
from paceline.predict.advice import advise, candidates
from paceline.predict.answer import simulate

SETTINGS: dict[str, tuple[str, str, int]] = {
    # name: model, link, hosts
    "resnet50-1gbit-2": ("resnet50", "1gbit", 2),
    "resnet50-1gbit-4": ("resnet50", "1gbit", 4),
    "resnet50-500mbit-3": ("resnet50", "500mbit", 3),
    "resnet50-2gbit-4": ("resnet50", "2gbit", 4),
    "resnet50-1gbit-6": ("resnet50", "1gbit", 6),
    "alexnet-1gbit-3": ("alexnet", "1gbit", 3),
    "alexnet-2gbit-4": ("alexnet", "2gbit", 4),
    "googlenet-1gbit-4": ("googlenet", "1gbit", 4),
    "googlenet-200mbit-4": ("googlenet", "200mbit", 4),
    "googlenet-500mbit-6": ("googlenet", "500mbit", 6),
}
NEAR, SHARE = 0.95, 0.8
LEAST, FEWEST = 0.8, 3
"""Of the best by prediction, which is off by a few percent; and so many in any case."""


def main() -> None:
    options = parse()
    wanted = [name for name in SETTINGS if not options.only or name in options.only.split(",")]
    began, found = time.monotonic(), kept(options)
    for name in wanted:
        for experiment in grid(name, options.steps):
            label = label_of(experiment)
            if label in found.get(name, {}) or time.monotonic() - began > options.seconds:
                continue
            rate = measure(experiment, options)
            if rate is None:
                continue
            found.setdefault(name, {})[label] = rate
            print(f"{name}: {label}: {rate:.1f} samples/s", file=sys.stderr, flush=True)
            if options.measured is not None:
                text = json.dumps(found, indent=1) + "\n"
                options.measured.write_text(text, encoding="utf-8")
    if options.measure_only:
        return
    rows = [judged(name, found[name], options) for name in wanted if is_whole(name, found, options)]
    answer = {"rows": rows, "checks": checks(rows)}
    if options.page is not None:
        put(options.page, "advice", page(answer))
    print(json.dumps(answer, indent=1) if options.json else page(answer))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="settings, comma-separated", default="")
    parser.add_argument("--on", choices=("tunnel", "predict"), default="tunnel")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--gbit", type=float, default=3.0, help="a second, on all links together")
    parser.add_argument("--pairs", type=Path, help="what predict.py kept: the same runs count here")
    parser.add_argument("--measure-only", action="store_true", help="judge nothing yet")
    parser.add_argument("--page", type=Path, help="put the table into this page")
    parser.add_argument("--measured", type=Path, help="runs are kept in this file, not repeated")
    parser.add_argument(
        "--for", type=float, default=math.inf, dest="seconds", help="begin none later"
    )
    return parser.parse_args()


def kept(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Setting -> architecture and members -> samples per second, of all that was measured."""
    found: dict[str, dict[str, float]] = {}
    if options.measured is not None and options.measured.exists():
        found = json.loads(options.measured.read_text(encoding="utf-8"))
    if options.pairs is not None:
        seconds = json.loads(options.pairs.read_text(encoding="utf-8"))
        for name, (model, link, hosts) in SETTINGS.items():
            for cell, runs in seconds.items():
                pair = pairs.experiment_of(cell)
                members = pair.cluster.workers + pair.num_servers
                same = (pair.workload.model, pair.cluster.link, members) == (model, link, hosts)
                plain = all(h.slowdown == 1 and h.workers < 2 for h in pair.cluster.hosts)
                if same and plain and pair.architecture.exclusive:
                    rate = pairs.BATCH * pair.cluster.workers / statistics.median(runs)
                    found.setdefault(name, {}).setdefault(label_of(pair), rate)
    return found


def asked(name: str, steps: int) -> spec.Experiment:
    model, link, hosts = SETTINGS[name]
    return spec.from_tables(
        {
            "name": name,
            "engine": "tunnel",
            "workload": {"model": model, "data": "synthetic", "batch": 32, "steps": steps},
            "architecture": "ring",
            "cluster": {"workers": hosts, "link": link, "device": "k80"},
            "measurement": {"warmup_steps": 3},
        },
        name,
    )


@cache
def grid(name: str, steps: int) -> list[spec.Experiment]:
    """All on the hosts of the setting that trains like one worker and may be the best."""
    everything = candidates(asked(name, steps), SETTINGS[name][2])
    alike = [e for e in everything if e.architecture.exclusive]
    found = sorted(((simulate(e).samples_per_second, e) for e in alike), key=lambda pair: -pair[0])
    least = min(LEAST * found[0][0], found[FEWEST - 1][0])
    return [e for rate, e in found if rate >= least]


def label_of(experiment: spec.Experiment) -> str:
    architecture = spec.format_architecture(experiment.architecture)
    return f"{architecture} {experiment.cluster.workers}+{experiment.num_servers}"


def measure(experiment: spec.Experiment, options: argparse.Namespace) -> float | None:
    """Samples per second, or None where the tunnel refused: a busy machine."""
    if options.on == "predict":
        return simulate(experiment).samples_per_second
    return pairs.rate_in_tunnel(pairs.slowed(experiment, options.gbit))


def is_whole(name: str, found: dict[str, dict[str, float]], options: argparse.Namespace) -> bool:
    return all(label_of(e) in found.get(name, {}) for e in grid(name, options.steps))


def judged(name: str, rates: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    first = advise(asked(name, options.steps), SETTINGS[name][2]).ranked[0]
    advised = f"{first.architecture} {first.workers}+{first.servers}"
    best = max(rates, key=lambda label: rates[label])
    return {
        "name": name,
        "advised": advised,
        "best": best,
        "share_of_best": rates[advised] / rates[best],
        "samples_per_second": rates,
        "seconds": 32 * first.workers / rates[advised],
    }


def page(answer: dict[str, Any]) -> str:
    """What was advised beside what else was run; samples per second."""
    lines = [
        "| setting | advised | | the others of the grid | of the best |",
        "|---|---|---|---|---|",
    ]
    for row in answer["rows"]:
        rates, advised = row["samples_per_second"], row["advised"]
        ranked = sorted(rates, key=lambda label: -rates[label])
        others = "; ".join(f"`{name}` {rates[name]:.1f}" for name in ranked if name != advised)
        share = f"{others} | {row['share_of_best']:.0%}"
        lines.append(f"| `{row['name']}` | `{advised}` | {rates[advised]:.1f} | {share} |")
    lines += [f"\n{c['name']}: {c['value']:.0%} (aim {c['target']:.0%})." for c in answer["checks"]]
    return "\n".join(lines) + "\n"


def checks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        return []
    share = sum(row["share_of_best"] >= NEAR for row in rows) / len(rows)
    name = f"First choice within 5 % of the best, of {len(rows)} settings"
    return [{"name": name, "value": share, "target": SHARE, "holds": share >= SHARE}]


if __name__ == "__main__":
    main()
