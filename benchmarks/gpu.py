"""Training on one GPU: ours beside a plain loop on the same model, in one process, turn by turn.

    python benchmarks/gpu.py --json
    python benchmarks/gpu.py --only plain feed --quick

The plain loop is what one would write by hand: the same samples on the device already, channels
last, autocast, fused SGD, no loss read. Ours is the built-in loop with its record, by default with
its passes recorded as CUDA graphs, and once without. Seconds are of one step, measured by events on
the device over all steps after the warm-up. Parts:

    plain     single against the plain loop, four models
    best      ResNet-50 with every option that helps
    feed      ResNet-50 fed from JPEG files and from decoded ones, against synthetic samples
    server    ResNet-50 with its weights on servers, in main memory and on the GPU, against single
    script    the same by a script of one's own (`gpu_script.py`), whose passes are not recorded
    follow    replicated, ring, hybrid, pipeline and server on this one GPU train like single
    batches   P1's Figure 8: the tutorial network at batches of 1 to 400
    models    every model of the papers, in three precisions
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from paceline import data, engines, record, spec
from paceline.builtin import batches, loop, optimizers
from paceline.errors import PacelineError
from paceline.launch import identify
from paceline.record import RunFolder
from paceline.session.session import Session

Row = dict[str, Any]

WARMUP = 12
PLAIN = {
    "resnet50": ("resnet50", 128, 60),
    "vgg16": ("vgg16", 128, 40),
    "alexnet": ("alexnet", 512, 60),
    "tutorial-cnn-100": ("tutorial-cnn", 100, 400),
    "tutorial-cnn-400": ("tutorial-cnn", 400, 400),
}
"""Name -> model, batch, steps."""

BEST = [{"batch": 256}, {"batch": 256, "compile": True}]
FIGURE_8 = (1, 10, 25, 50, 100, 150, 200, 250, 300, 350, 400)
TABLE = {
    "tutorial-cnn": 400,
    "alexnet": 512,
    "vgg16": 128,
    "vgg19": 128,
    "googlenet": 256,
    "inception3": 128,
    "resnet50": 128,
    "resnet101": 128,
    "resnet152": 128,
    "gpt-small": 128,
}
SERVED = {
    "server-1": ("server", 1),
    "server-4": ("server", 4),
    "colocated": ("server:placement=colocated", 0),
}
"""Contender -> its architecture and server processes."""

ONCE = ("server-4",)
SCRIPTED = {
    "single": ("single", 0),
    "server-1": ("server", 1),
    "server-1-2MiB": ("server:chunk=2MiB", 1),
}
PARTS = ("plain", "best", "feed", "server", "script", "follow", "batches", "models")
CLOSE = 1e-4


def main() -> None:
    given = parse()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: this machine has no GPU that torch can use.")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as temporary:
        bench = Bench(Path(temporary), rows, given)
        for part in given.only:
            getattr(bench, part)()
    result = {
        "machine": f"one {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "rows": rows,
        "checks": checks(rows),
    }
    print(json.dumps(result) if given.json else table(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a third of the steps")
    parser.add_argument("--pictures", help="a folder or archive as imagefolder takes it")
    return parser.parse_args()


class Bench:
    """The parts; each adds its rows."""

    def __init__(self, folder: Path, rows: list[Row], given: argparse.Namespace) -> None:
        self._folder, self._rows, self._given, self._runs = folder, rows, given, 0

    def plain(self) -> None:
        for setting, (model, batch, steps) in PLAIN.items():
            workload = self._workload(model, batch, steps)
            eager = spec.Workload(**{**fields(workload), "graph": "off"})
            contenders = {
                "plain": lambda workload=workload: plain_loop(workload),
                "single": lambda workload=workload: self._ours(workload),
                "single-eager": lambda eager=eager: self._ours(eager),
            }
            for repeat in range(self._given.repeats):
                names = [*contenders][repeat:] + [*contenders][:repeat]
                for name in names:  # in an order that turns: a warm chip is a slower one
                    self._add("plain", setting, name, repeat, batch, contenders[name]())

    def best(self) -> None:
        for options in BEST:
            batch = int(options["batch"])
            workload = self._workload("resnet50", batch, 60, compile="compile" in options)
            name = f"resnet50-{batch}" + ("-compile" if workload.compile else "")
            self._add("best", name, "single", 0, batch, self._ours(workload))

    def feed(self) -> None:
        if not self._given.pictures:
            self._rows.append({"part": "feed", "failed": "no --pictures were given"})
            return
        pictures = many(Path(self._given.pictures), self._folder / "pictures", 2560)
        batch, steps = 256, 60
        kinds: dict[str, dict[str, Any]] = {
            "synthetic": {"input_shape": (3, 224, 224)},
            "jpeg": {"data": "imagefolder", "data_dir": str(pictures)},
            "cached": {"data": "imagefolder", "data_dir": str(pictures), "cache": True},
        }
        for repeat in range(self._given.repeats):
            for kind, options in kinds.items():
                workload = self._workload("resnet50", batch, steps, **options)
                self._add("feed", "resnet50", kind, repeat, batch, self._ours(workload))

    def server(self) -> None:
        """One worker on the GPU. Also why it is no faster: where the steps' time goes, and how long
        servers compute for one."""
        for batch in (128, 256):
            workload = self._workload("resnet50", batch, 60)
            for repeat in range(self._given.repeats):
                seconds = self._ours(workload)
                self._add("server", f"resnet50-{batch}", "single", repeat, batch, seconds)
                for name, (text, servers) in SERVED.items():
                    if name not in ONCE or (repeat == 0 and batch == 128):
                        self._serve(workload, name, text, servers, repeat)

    def script(self) -> None:
        batch, steps = 128, WARMUP + 40
        path = str(Path(__file__).with_name("gpu_script.py"))
        script = spec.Script(path=path, arguments=(str(steps), str(batch)))
        for repeat in range(self._given.repeats):
            for name, (text, servers) in SCRIPTED.items():
                if name in ("single", "server-1") or repeat == 0:
                    experiment = self._experiment(spec.Workload(script=script), text, 1, servers)
                    folder = engines.run(experiment, self._folder / f"run{self._runs}")
                    taken = folder.steps("worker0")[WARMUP:]
                    seconds = (taken[-1].end_seconds - taken[0].start_seconds) / len(taken)
                    self._add("script", "resnet50-128", name, repeat, batch, seconds)

    def _serve(
        self, workload: spec.Workload, name: str, text: str, servers: int, repeat: int
    ) -> None:
        folder = self._train(workload, spec.parse_architecture(text), 1, servers)
        members = {member.name: member for member in folder.members()}
        steps = folder.steps("worker0")[WARMUP:]
        phases = {phase for step in steps for phase in step.breakdown_seconds}
        parts = {
            phase: statistics.median(step.breakdown_seconds.get(phase, 0.0) for step in steps)
            for phase in sorted(phases)
        }
        seats = [member.counters.get("busy_seconds") for member in members.values()]
        busy = [seconds / workload.steps for seconds in seats if isinstance(seconds, float)]
        batch = workload.batch or 1
        self._add(
            "server",
            f"resnet50-{batch}",
            name,
            repeat,
            batch,
            (steps[-1].end_seconds - steps[0].start_seconds) / len(steps),
            breakdown_seconds=parts,
            server_busy_seconds=max(busy, default=0.0),
        )

    def follow(self) -> None:
        common: dict[str, Any] = {"steps": 20, "global_batch": 64, "data": "shapes"}
        workload = spec.Workload(model="tutorial-cnn", **common)
        alone = self._losses(workload, spec.Single())
        for text, workers, servers in (
            ("replicated:devices=2", 1, 0),
            ("replicated:devices=2,shares=3/1", 1, 0),
            ("ring", 2, 0),
            ("hybrid", 2, 0),
            ("pipeline", 2, 0),
            ("pipeline:schedule=gpipe", 2, 0),
            ("server", 1, 1),
            ("server", 2, 1),
            ("server:placement=colocated", 2, 0),
        ):
            row: Row = {"part": "follow", "setting": text, "workers": workers, "servers": servers}
            try:
                found = self._losses(workload, spec.parse_architecture(text), workers, servers)
            except PacelineError as error:
                self._rows.append({**row, "failed": str(error)[-600:]})
                continue
            worst = max(abs(found[step] / alone[step] - 1) for step in alone)
            self._rows.append({**row, "steps": len(found), "largest_difference": worst})
            show(self._rows[-1])

    def batches(self) -> None:
        for batch in FIGURE_8:
            workload = self._workload("tutorial-cnn", batch, 200, precision="float32")
            self._add("batches", "tutorial-cnn", "single", 0, batch, self._ours(workload))

    def models(self) -> None:
        for model, batch in TABLE.items():
            for precision in ("float32", "tf32", "bfloat16"):
                workload = self._workload(model, batch, 30, precision=precision)
                row = {"model": model, "precision": precision}
                self._add("models", model, "single", 0, batch, self._ours(workload), **row)

    def _workload(self, model: str, batch: int, steps: int, **options: Any) -> spec.Workload:
        steps = WARMUP + (steps // 3 if self._given.quick else steps)
        common: dict[str, Any] = {
            "data": "synthetic",
            "precision": "bfloat16",
            "optimizer": spec.Optimizer(learning_rate=0.01, momentum=0.9),
        }
        return spec.Workload(model=model, batch=batch, steps=steps, **{**common, **options})

    def _add(
        self, part: str, setting: str, contender: str, repeat: int, batch: int, seconds: float,
        **more: Any,
    ) -> None:  # fmt: skip
        row = {"part": part, "setting": setting, "contender": contender, "repeat": repeat}
        rate = batch / seconds
        row |= {"batch": batch, "seconds": seconds, "samples_per_second": rate, **more}
        self._rows.append(row)
        show(row)

    def _ours(self, workload: spec.Workload) -> float:
        folder = self._train(workload, spec.Single())
        steps = folder.steps("worker0")[WARMUP:]
        return (steps[-1].end_seconds - steps[0].start_seconds) / len(steps)

    def _train(
        self,
        workload: spec.Workload,
        architecture: spec.Architecture,
        workers: int = 1,
        servers: int = 0,
    ) -> RunFolder:
        """One member is the built-in loop in this very process: starting it costs nothing."""
        text = spec.format_architecture(architecture)
        experiment = self._experiment(workload, text, workers, servers)
        path = self._folder / f"run{self._runs}"
        if workers + servers > 1:
            return engines.run(experiment, path)
        folder = RunFolder.create(path, experiment)
        session = Session(
            identify({}), options=architecture, folder=folder, measurement=experiment.measurement
        )
        try:
            loop.train(experiment, session, folder)
        finally:
            session.close()
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
        return folder

    def _experiment(
        self, workload: spec.Workload, text: str, workers: int, servers: int
    ) -> spec.Experiment:
        self._runs += 1
        return spec.Experiment(
            workload=workload,
            architecture=spec.parse_architecture(text),
            cluster=spec.Cluster(workers=workers, servers=servers),
        )

    def _losses(
        self,
        workload: spec.Workload,
        architecture: spec.Architecture,
        workers: int = 1,
        servers: int = 0,
    ) -> dict[int, float]:
        folder = self._train(workload, architecture, workers, servers)
        names = [member.name for member in folder.members() if member.role == "worker"]
        return record.losses({name: folder.steps(name) for name in names})


def plain_loop(workload: spec.Workload) -> float:
    """What one would write by hand, and nothing else."""
    device = torch.device("cuda")
    torch.manual_seed(workload.seed)
    torch.backends.cudnn.benchmark = True
    dataset = batches.open_data(workload)
    dataset.move(device)
    model = loop.build_model(workload, dataset)
    order = data.GlobalBatches(len(dataset), workload.batch, shuffle=False)
    batches = [dataset.batch(order.indices(step)) for step in range(order.steps_per_epoch)]
    optimizer = optimizers.build(workload.optimizer, model.parameters())
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(workload.steps):
        if step == WARMUP:
            first.record()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=workload.precision == "bfloat16"):
            inputs, targets = batches[step % len(batches)]
            loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    last.record()
    last.synchronize()
    del model, optimizer, dataset, batches, inputs, targets
    torch.cuda.empty_cache()
    return float(first.elapsed_time(last)) / 1e3 / (workload.steps - WARMUP)


def fields(workload: spec.Workload) -> dict[str, Any]:
    return {name: getattr(workload, name) for name in workload.__struct_fields__}


def many(pictures: Path, target: Path, count: int) -> Path:
    """A folder of about `count` pictures: those given, under several names."""
    source = pictures
    if source.is_file():
        shutil.unpack_archive(source, target / "given", filter="data")
        source = target / "given"
    found = sorted(path for path in source.rglob("train/*/*") if path.is_file())
    for number in range(count):
        original = found[number % len(found)]
        folder = target / "train" / original.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        os.link(original, folder / f"{number}{original.suffix}")
    shutil.rmtree(target / "given", ignore_errors=True)
    return target


def checks(rows: list[Row]) -> list[Row]:
    """The lines that the rows cover."""
    found: list[Row] = []

    def rate(part: str, setting: str, contender: str) -> float | None:
        rates = [
            row["samples_per_second"]
            for row in rows
            if (row["part"], row.get("setting"), row.get("contender")) == (part, setting, contender)
        ]
        return statistics.median(rates) if rates else None

    def check(name: str, value: float, target: float, *, least: bool = True) -> None:
        holds = value >= target if least else value <= target
        found.append({"name": name, "value": value, "target": target, "holds": holds})

    for setting in PLAIN:
        ours, plain = rate("plain", setting, "single"), rate("plain", setting, "plain")
        if ours and plain:
            check(f"{setting}: single / plain loop", ours / plain, 1.0)
    best = [r["samples_per_second"] for r in rows if r["part"] == "best"]
    if best:
        check("resnet50: images/s with the best options", max(best), 5000.0)
    synthetic = rate("feed", "resnet50", "synthetic")
    for kind in ("jpeg", "cached"):
        fed = rate("feed", "resnet50", kind)
        if synthetic and fed:
            check(f"resnet50 from {kind} samples / synthetic", fed / synthetic, 0.95)
    for batch in (128, 256):
        setting = f"resnet50-{batch}"
        alone = rate("server", setting, "single")
        for name in SERVED:
            served = rate("server", setting, name)
            if alone and served:
                check(f"{setting}: {name} / single", served / alone, 0.9)
    alone = rate("script", "resnet50-128", "single")
    for name in SCRIPTED:
        served = rate("script", "resnet50-128", name)
        if alone and served and name != "single":
            check(f"a script of one's own: {name} / single", served / alone, 0.9)
    for row in rows:
        if row["part"] == "follow":
            worst = row.get("largest_difference", float("inf"))
            members = f"{row['workers']} workers, {row['servers']} servers"
            check(f"{row['setting']}, {members}, follows single", worst, CLOSE, least=False)
    return found


def show(row: Row) -> None:
    words = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{value}"
        for key, value in row.items()
        if key != "part"
    )
    print(f"{time.strftime('%H:%M:%S')} {row['part']}: {words}", file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    lines = [result["machine"]]
    for check in result["checks"]:
        verdict = "holds" if check["holds"] else "FAILS"
        lines.append(f"{verdict}  {check['name']}: {check['value']:.4g} ({check['target']:g})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
