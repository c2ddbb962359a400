"""Architectures on emulated hosts at 1 Gbit: gradients of ResNet-50, 4 workers, emulated compute.

    python benchmarks/tunnel.py --json
    python benchmarks/tunnel.py --compute 0.9 --only ddp,server-4 --repeats 1

Every row stands beside its limit, max(compute, closed form at the rate TCP leaves of a link). Runs
alternate, and a row is the median of its repeats. `--dilation 4` runs everything four times slower,
which takes this machine's cores out of the picture; times are reported undilated.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from paceline import engines, spec
from paceline.errors import PacelineError
from paceline.protocol.placement import exchange_seconds
from paceline.record import RunFolder
from paceline.spec.profile import DeviceProfile, find_profile, save_profile
from paceline.telemetry.queues import HEADER_BYTES
from paceline.tunnel.links import SEGMENT_BYTES

WORKERS, LINK, BATCH = 4, "1gbit", 32
PAYLOAD_FRACTION = SEGMENT_BYTES / (SEGMENT_BYTES + HEADER_BYTES)
"""Share of a link's rate left for TCP's payload: 0.956."""

PAYLOAD_BYTES_PER_SECOND = 1e9 / 8 * PAYLOAD_FRACTION
COMPUTE_SECONDS = (0.15, 0.9, 1.5)
TRIES, PAUSE_SECONDS = 4, 15.0
DDP_SCRIPT = str(Path(__file__).with_name("tunnel_ddp.py").absolute())

ROWS: dict[str, tuple[str, int]] = {
    "ddp": ("ring", 0),
    "ring": ("ring", 0),
    "server-1": ("server", 1),
    "server-2": ("server", 2),
    "server-4": ("server", 4),
    "colocated": ("server:placement=colocated", 0),
    "optimal-2": ("server:placement=optimal", 2),
}
STRAGGLER_ROWS: dict[str, tuple[str, int]] = {
    "straggler-sync": ("server", 4),
    "straggler-quorum": (f"server:mode=quorum,quorum={WORKERS - 1}", 4),
    "straggler-async": ("server:mode=async", 4),
}
STRAGGLER_COMPUTE_SECONDS = (0.9, 1.5)
"""A quorum is known when its members have made a whole step, so weights travel back after backward
and not during it: it pays where compute, and not the network, is what the straggler holds up."""


def main() -> None:
    options = parse()
    cells = planned(options)
    results: dict[tuple[str, float], list[dict[str, Any]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as temporary:
        for repeat in range(options.repeats):
            for name, compute in cells:
                path = Path(temporary) / f"{name}-{compute:g}-{repeat}"
                row = measure_patiently(name, compute, path, options)
                results[name, compute].append(row)
                text = f"{name}, compute {compute:g} s: {row['seconds']:.3f} s a step"
                print(text, file=sys.stderr, flush=True)
    rows = [middle(found) for found in results.values()]
    answer = {"dilation": options.dilation, "rows": rows, "checks": checks(rows)}
    if options.json:
        print(json.dumps(answer, indent=1))
    else:
        show(answer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compute", help="seconds, comma-separated", default="")
    parser.add_argument("--only", help="rows, comma-separated", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--dilation", type=float, default=1.0)
    return parser.parse_args()


def planned(options: argparse.Namespace) -> list[tuple[str, float]]:
    """Which rows at which compute, in the order of one round."""
    computes = tuple(map(float, options.compute.split(","))) if options.compute else COMPUTE_SECONDS
    cells = [(name, compute) for compute in computes for name in ROWS]
    cells += [("bare-ring", 0.0)]
    asked = [c for c in STRAGGLER_COMPUTE_SECONDS if not options.compute or c in computes]
    cells += [(name, compute) for compute in asked for name in STRAGGLER_ROWS]
    wanted = set(filter(None, options.only.split(",")))
    return [cell for cell in cells if not wanted or cell[0] in wanted]


def measure_patiently(
    name: str, compute: float, path: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """A link that another program's burst of work held up is measured again a little later."""
    for attempt in range(1, TRIES):
        try:
            return measure(name, compute, path.with_name(f"{path.name}-{attempt}"), options)
        except PacelineError as error:
            print(f"{name}, compute {compute:g} s, again: {error}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_SECONDS)
    return measure(name, compute, path, options)


def measure(name: str, compute: float, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of one row."""
    text, servers = {**ROWS, **STRAGGLER_ROWS, "bare-ring": ("ring", 0)}[name]
    profile = profile_of(compute)
    profile_path = path.with_suffix(".json")
    save_profile(profile, profile_path)
    hosts = [spec.Host(count=WORKERS)]
    if name in STRAGGLER_ROWS:
        hosts = [spec.Host(count=WORKERS - 1), spec.Host(slowdown=2.0)]
    if servers:
        hosts.append(spec.Host(count=servers, workers=0, servers=1))
    experiment = spec.Experiment(
        name=name,
        engine="tunnel",
        workload=spec.Workload(
            model="resnet50", data="synthetic", batch=BATCH, steps=options.steps
        ),
        architecture=spec.parse_architecture(text),
        cluster=spec.Cluster(
            workers=WORKERS,
            servers=servers,
            link=LINK,
            device=str(profile_path),
            hosts=tuple(hosts),
            dilation=options.dilation,
        ),
        measurement=spec.Measurement(warmup_steps=3),
    )
    asked = with_ddp(experiment) if name == "ddp" else experiment
    folder = engines.run(asked, path)
    return described(name, compute, profile, experiment, folder)


def with_ddp(experiment: spec.Experiment) -> spec.Experiment:
    """The same experiment, trained by the plain script."""
    workload = experiment.workload
    arguments = (workload.model, str(workload.batch), str(workload.steps))
    script = spec.Script(path=DDP_SCRIPT, arguments=arguments)
    return spec.replace(experiment, workload=spec.Workload(script=script))


def profile_of(compute: float) -> DeviceProfile:
    """ResNet-50's layers with their measured proportions, `compute` seconds in all."""
    measured = find_profile("h200", "resnet50")
    scale = max(compute, 1e-6) / measured.step_seconds(measured.batch)
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_seconds=layer.forward_seconds * scale,
            backward_seconds=layer.backward_seconds * scale,
        )
        for layer in measured.layers
    )
    source = f"{measured.source}; scaled to {compute:g} s"
    return msgspec.structs.replace(
        measured, batch=BATCH, layers=layers, source=source, overhead_seconds=0.0
    )


def described(
    name: str,
    compute: float,
    profile: DeviceProfile,
    experiment: spec.Experiment,
    folder: RunFolder,
) -> dict[str, Any]:
    summary = folder.summary()
    size, architecture = profile.parameter_bytes, experiment.architecture
    placement = architecture.placement if isinstance(architecture, spec.Server) else "colocated"
    exchange = exchange_seconds(
        placement, WORKERS, experiment.num_servers, size, PAYLOAD_BYTES_PER_SECOND
    )
    fields = msgspec.to_builtins(summary)
    row = {
        "name": name,
        "compute_seconds": compute,
        "seconds": fields["step_seconds"]["median"],
        "samples_per_second": fields["samples_per_second"],
        "exchange_limit_seconds": exchange,
        "limit_seconds": max(compute, exchange),
        "gradient_bytes": size,
        "cpu_fraction": sum(member.cpu_fraction or 0.0 for member in summary.members),
    }
    if name in ("ddp", "ring", "bare-ring"):
        # An all-reduce cannot start before backward: forward is never hidden.
        forward = sum(layer.forward_seconds for layer in profile.layers)
        row["overlap_limit_seconds"] = forward + max(compute - forward, exchange)
    if name == "bare-ring":
        row |= wire(folder, size, experiment)
    return row


def wire(folder: RunFolder, size: int, experiment: spec.Experiment) -> dict[str, float]:
    """What a worker's cable carried, beside the closed form.

    The first weights travel as a tree, so the worker that sent least is the one with none to pass.
    """
    steps = experiment.workload.steps
    closed = steps * 2 * (WORKERS - 1) / WORKERS * size
    member = min(folder.members(), key=lambda member: member.bytes_sent or 0)
    assert member.bytes_sent is not None
    assert member.packets_sent is not None
    entries = folder.steps(member.name)[3:]
    seconds = statistics.median(entry.end_seconds - entry.start_seconds for entry in entries)
    return {
        "link_bits_per_second": 8 * closed / steps / PAYLOAD_FRACTION / seconds,
        "payload_bits_per_second": 8 * closed / steps / seconds,
        "closed_form_bytes": closed,
        "payload_bytes_sent": member.bytes_sent - HEADER_BYTES * member.packets_sent,
        "packets_sent": member.packets_sent,
        "closed_form_packets": closed / SEGMENT_BYTES,
    }


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The repeat with the median time, and all times."""
    ordered = sorted(found, key=lambda row: row["seconds"])
    return {**ordered[len(ordered) // 2], "repeats": [row["seconds"] for row in found]}


def checks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the design that these rows cover; those whose rows are missing are left out."""
    by_cell = {(row["name"], row["compute_seconds"]): row for row in rows}
    found: list[dict[str, Any]] = []

    def add(name: str, value: float, target: float, holds: Callable[[float, float], bool]) -> None:
        found.append(
            {"name": name, "value": value, "target": target, "holds": holds(value, target)}
        )

    def least(value: float, target: float) -> bool:
        return value >= target

    def most(value: float, target: float) -> bool:
        return value <= target

    def ratio(
        over: tuple[str, float], under: tuple[str, float], what: str = "seconds"
    ) -> float | None:
        if over not in by_cell or under not in by_cell:
            return None
        return float(by_cell[over][what] / by_cell[under][what])

    wanted = [
        ("server-4 over ddp at 0.9 s", ("ddp", 0.9), ("server-4", 0.9), 1.4),
        ("2 servers over 1 when servers limit", ("server-1", 0.15), ("server-2", 0.15), 1.9),
        ("4 servers over 1 when servers limit", ("server-1", 0.15), ("server-4", 0.15), 3.5),
    ]
    for name, over, under, target in wanted:
        value = ratio(over, under)
        if value is not None:
            add(name, value, target, least)
    for row in rows:
        if row["name"] in ROWS and row["name"] != "ddp":
            limit = row.get("overlap_limit_seconds", row["limit_seconds"])
            name = f"{row['name']} over its limit at {row['compute_seconds']:g} s"
            add(name, row["seconds"] / limit, 1.10, most)
    for name, compute in product(("quorum", "async"), STRAGGLER_COMPUTE_SECONDS):
        cell, sync = (f"straggler-{name}", compute), ("straggler-sync", compute)
        value = ratio(cell, sync, "samples_per_second")
        if value is not None:
            add(f"straggler, {name} over sync at {compute:g} s, samples/s", value, 1.0, least)
    bare = by_cell.get(("bare-ring", 0.0))
    if bare is not None:
        rate = bare["payload_bits_per_second"] / 1e9
        add("bare ring, Gbit/s per link and direction", rate, 0.92, least)
        for what in ("bytes", "packets"):
            sent = bare["payload_bytes_sent" if what == "bytes" else "packets_sent"]
            off = abs(sent / bare[f"closed_form_{what}"] - 1)
            add(f"bare ring, {what} off the closed form", off, 0.05, most)
    return found


def show(answer: dict[str, Any]) -> None:
    for row in answer["rows"]:
        limit = row.get("overlap_limit_seconds", row["limit_seconds"])
        name, compute, seconds = row["name"], row["compute_seconds"], row["seconds"]
        print(
            f"{name:18} compute {compute:4.2f} s  step {seconds:6.3f} s  limit {limit:6.3f} s"
            f"  x{seconds / limit:5.2f}  cpu {row['cpu_fraction']:4.2f}"
        )
    for check in answer["checks"]:
        word = "holds" if check["holds"] else "FALLS SHORT"
        print(f"{word:12} {check['name']}: {check['value']:.3f} (target {check['target']:g})")


if __name__ == "__main__":
    main()
