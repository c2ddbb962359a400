"""`paceline profile`: per-layer times and sizes of a model on the device at hand, as a file."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline.spec.profile import DeviceProfile

SETTINGS = {
    "epilog": "Example: paceline profile --model resnet50 --batch 32 --device cuda --out gpu.json, "
    "then paceline train --on tunnel --model resnet50 --device gpu.json --workers 4 …"
}


def command(
    model: Annotated[str, typer.Option(help="A built-in model, or module:function.")],
    batch: Annotated[int, typer.Option(help="Samples in a step.")] = 32,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[
        str, typer.Option(help="float32, tf32, or bfloat16 by autocast.")
    ] = "float32",
    layout: Annotated[str, typer.Option(help="channels-first or channels-last.")] = "channels-last",
    shape: Annotated[str, typer.Option(help="One sample, such as 3x32x32; the model's own.")] = "",
    threads: Annotated[int | None, typer.Option(help="Compute threads on a CPU.")] = None,
    repeats: Annotated[int, typer.Option(help="Steps of which the median counts.")] = 15,
    name: Annotated[str | None, typer.Option(help="What to call the device.")] = None,
    out: Annotated[Path | None, typer.Option(help="Profile file to write.")] = None,
    json: flags.Json = False,
) -> None:
    """Measure forward and backward seconds of each layer; `tunnel` and `predict` use the file."""
    from paceline.cli import console
    from paceline.errors import SpecError
    from paceline.spec.base import LARGEST
    from paceline.spec.cluster import MOST_THREADS
    from paceline.spec.profile import save_profile

    _check("--device", device, ("cpu", "cuda"))
    _check("--precision", precision, ("float32", "tf32", "bfloat16"))
    if precision == "tf32" and device == "cpu":
        _check("--precision", precision, ("float32", "bfloat16"))
    _check("--layout", layout, ("channels-first", "channels-last"))
    given = {"--batch": batch, "--repeats": repeats, "--threads": 1 if threads is None else threads}
    for flag, number in given.items():
        if not 1 <= number <= LARGEST:
            raise SpecError(flag, f"{number} is none, or too many.", "write a number above zero.")
    if threads is not None and threads > MOST_THREADS:
        problem = f"{threads} are more than any machine has cores."
        raise SpecError("--threads", problem, "leave it out for one.")
    if name is not None and not re.fullmatch(r"[\w .:+=,-]+", name):
        problem = f"{name!r} cannot name a device."
        raise SpecError("--name", problem, "use letters, digits and dashes.")
    if out is not None:
        console.check_target(out, may_exist=out.is_file())
    profile = _measure(model, batch, device, precision, layout, shape, threads, repeats, name)
    path = out or Path(f"{profile.device}-{model.replace(':', '-')}-{precision}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    if json:
        console.print_json(profile)
    else:
        _print(profile)
    console.err.print(f"profile in {path}")


def _check(flag: str, value: str, known: tuple[str, ...]) -> None:
    from paceline.errors import SpecError, suggest

    if value not in known:
        raise SpecError(flag, f'"{value}" is not known.', suggest(value, known))


def _measure(
    model: str,
    batch: int,
    device: str,
    precision: str,
    layout: str,
    shape: str,
    threads: int | None,
    repeats: int,
    name: str | None,
) -> "DeviceProfile":
    import msgspec
    import torch

    from paceline import models
    from paceline.cli import console
    from paceline.compute import profiling
    from paceline.errors import MissingError, SpecError
    from paceline.spec.profile import DeviceProfile

    if device == "cuda" and not torch.cuda.is_available():
        problem = "this machine has no GPU that torch can use."
        raise MissingError(problem, "leave --device out to profile the CPU.")
    described = models.info(model)
    input_shape = _parse_shape(shape, batch) or (described.input_shape if described else None)
    if input_shape is None:
        problem = f"the shape of one sample of {model} is not known."
        raise SpecError("--shape", problem, "give it, such as --shape 3x224x224.")
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(threads or 1)
    rounds = precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounds
    torch.backends.cudnn.benchmark = True
    built = models.build(model, input_shape=input_shape).to(device)
    with console.step_progress(model, profiling.num_passes(batch, repeats)) as progress:
        measured = profiling.profile(
            built,
            input_shape,
            batch=batch,
            tokens=described is not None and described.tokens,
            num_classes=described.num_classes if described else 2,
            channels_last=layout == "channels-last",
            autocast=precision == "bfloat16",
            repeats=repeats,
            progress=progress,
        )
    fields = {
        "device": name or device,
        "model": model,
        "batch": batch,
        "input_shape": input_shape,
        "kind": "measured",
        "precision": precision,
        "source": f"paceline profile, {profiling.describe_device(device)}, {layout}",
        "overhead_seconds": measured.overhead_seconds,
        "layers": [layer._asdict() for layer in measured.layers],
    }
    return msgspec.convert(fields, DeviceProfile)


def _parse_shape(text: str, batch: int) -> tuple[int, ...]:
    """Of one sample, as it was given: 3x224x224; empty where it was not."""
    from paceline.errors import SpecError
    from paceline.spec.base import LARGEST

    try:
        shape = tuple(int(part) for part in text.split("x")) if text else ()
        if text and not (min(shape) >= 1 and math.prod(shape) * batch <= LARGEST):
            raise ValueError
    except ValueError:
        raise SpecError("--shape", f'"{text}" is no shape.', "write it as 3x224x224.") from None
    return shape


def _print(profile: "DeviceProfile") -> None:
    from rich.table import Table

    from paceline.cli import console
    from paceline.units import format_bytes, format_seconds

    step = profile.step_seconds(profile.batch)
    rate = profile.batch / step
    title = f"{profile.model} on {profile.device}, batch {profile.batch}: {rate:.1f} samples/s"
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "forward", "backward", "parameters"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in profile.layers:
        table.add_row(
            layer.name,
            format_seconds(layer.forward_seconds),
            format_seconds(layer.backward_seconds),
            format_bytes(layer.parameter_bytes),
        )
    table.add_row("all", format_seconds(step), "", format_bytes(profile.parameter_bytes))
    console.out.print(table)
