"""Advice tested by running it: is the first choice of `advise` near the best of a measured grid?

    python benchmarks/advise.py --json
    python benchmarks/advise.py --measured advised.json --for 420 --dilation 4
    python benchmarks/advise.py --on predict          # the benchmark itself, in seconds

For each setting (a model, a link, a number of hosts) everything that `advise` considers and that
trains like one worker is measured in the tunnel. The advice holds where its first choice gives at
least 95 % of the best. Runs are kept with `--measured`, as in predict.py: a round takes an hour.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline import engines, spec
from paceline.errors import PacelineError
from paceline.predict.advice import advise, candidates, trains_like_single

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


def main() -> None:
    options = parse()
    wanted = [name for name in SETTINGS if not options.only or name in options.only.split(",")]
    began, found = time.monotonic(), kept(options.measured)
    for name in wanted:
        for experiment in grid(name, options):
            label = label_of(experiment)
            if label in found.get(name, {}) or time.monotonic() - began > options.seconds:
                continue
            rate = measure(experiment)
            if rate is None:
                continue
            found.setdefault(name, {})[label] = rate
            print(f"{name}: {label}: {rate:.1f} samples/s", file=sys.stderr, flush=True)
            if options.measured is not None:
                text = json.dumps(found, indent=1) + "\n"
                options.measured.write_text(text, encoding="utf-8")
    rows = [judged(name, found[name], options) for name in wanted if is_whole(name, found, options)]
    answer = {"rows": rows, "checks": checks(rows)}
    if options.json:
        print(json.dumps(answer, indent=1))
        return
    for row in rows:
        print(f"{row['name']:20} {row['advised']:36} {row['share_of_best']:6.1%} of {row['best']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="settings, comma-separated", default="")
    parser.add_argument("--on", choices=("tunnel", "predict"), default="tunnel")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dilation", type=float, default=1.0)
    parser.add_argument("--measured", type=Path, help="runs are kept in this file, not repeated")
    parser.add_argument(
        "--for", type=float, default=math.inf, dest="seconds", help="begin none later"
    )
    return parser.parse_args()


def kept(path: Path | None) -> dict[str, dict[str, float]]:
    if path is None or not path.exists():
        return {}
    found: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def asked(name: str, options: argparse.Namespace) -> spec.Experiment:
    model, link, hosts = SETTINGS[name]
    return spec.from_tables(
        {
            "name": name,
            "engine": options.on,
            "workload": {"model": model, "data": "synthetic", "batch": 32, "steps": options.steps},
            "architecture": "ring",
            "cluster": {
                "workers": hosts,
                "link": link,
                "device": "k80",
                "dilation": options.dilation if options.on == "tunnel" else 1.0,
            },
            "measurement": {"warmup_steps": 3},
        },
        name,
    )


def grid(name: str, options: argparse.Namespace) -> list[spec.Experiment]:
    """All that trains like one worker, on the hosts of the setting."""
    all_of = candidates(asked(name, options), SETTINGS[name][2], 1)
    return [e for e in all_of if trains_like_single(e.architecture)]


def label_of(experiment: spec.Experiment) -> str:
    architecture = spec.format_architecture(experiment.architecture)
    return f"{architecture} {experiment.cluster.workers}+{experiment.num_servers}"


def measure(experiment: spec.Experiment) -> float | None:
    """Samples per second, or None where the tunnel refused: a busy machine."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            folder = engines.run(experiment, Path(temporary) / "run")
        except PacelineError as error:
            print(f"{label_of(experiment)}: {error}", file=sys.stderr, flush=True)
            return None
        rate = folder.summary().samples_per_second
    return rate if isinstance(rate, float) else None


def is_whole(name: str, found: dict[str, dict[str, float]], options: argparse.Namespace) -> bool:
    return all(label_of(e) in found.get(name, {}) for e in grid(name, options))


def judged(name: str, rates: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    first = advise(asked(name, options), SETTINGS[name][2]).ranked[0]
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


def checks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        return []
    share = sum(row["share_of_best"] >= NEAR for row in rows) / len(rows)
    name = f"first choice within 5 % of the best, of {len(rows)} settings"
    return [{"name": name, "value": share, "target": SHARE, "holds": share >= SHARE}]


if __name__ == "__main__":
    main()
