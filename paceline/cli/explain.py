"""`paceline explain`: where a run's time went, what limits it, what to do next."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline.explain import Explanation, Resource

SETTINGS = {
    "epilog": "Examples: paceline explain runs/ring-4 runs/single-1 · "
    "paceline explain runs/20260101-120000-demo (each run of a comparison beside its baseline)"
}


def command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a comparison's folder.")],
    baseline: Annotated[
        Path | None, typer.Argument(help="A run to compare with, such as one worker alone.")
    ] = None,
    link: Annotated[
        str, typer.Option(help="Rate of the cables, where the run does not know it: 10gbit.")
    ] = "",
    json: flags.Json = False,
) -> None:
    """Say where the time of RUN went, with the counter that proves each line."""
    from paceline.bench.compare import QUESTION
    from paceline.cli import console
    from paceline.cli.runs import open_run
    from paceline.explain import explain

    if baseline is None and (run / QUESTION).is_file():
        _explain_comparison(run, json)
        return
    found = explain(open_run(run), open_run(baseline) if baseline else None, link=link)
    if json:
        console.print_json(found)
        return
    _show(found)


def _explain_comparison(path: Path, json: bool) -> None:
    """The comparison's verdict, and each row's beside its baseline."""
    from paceline.bench.compare import ComparisonFolder
    from paceline.cli import console
    from paceline.report.rows import labels
    from paceline.report.verdicts import explained, with_verdict

    folder = ComparisonFolder.open(path)
    table = folder.table()
    found = explained(table)
    verdict = with_verdict(table, found).verdict
    if json:
        console.print_json({"verdict": verdict, "rows": found})
        return
    console.out.print(verdict, style="bold", markup=False)
    names = labels(table.rows)
    for row in table.rows:
        console.out.print(f"\n{names[row.cell]}", style="bold", markup=False)
        said = found[row.cell].verdict if row.cell in found else row.failed or "not explained"
        console.out.print(said, markup=False)


def _show(found: "Explanation") -> None:
    from paceline.cli.console import out

    out.print(found.verdict, style="bold", markup=False)
    if found.steps:
        _show_parts(found)
    if found.wall:
        _show_wall(found)
    for line in _lines(found):
        out.print(line, markup=False)


def _show_parts(found: "Explanation") -> None:
    from rich import box
    from rich.table import Table

    from paceline.cli.console import out
    from paceline.units import format_seconds

    step, ideal = format_seconds(found.step_seconds), format_seconds(found.ideal_seconds)
    title = f"\n{found.run}: the typical step takes {step}, ideal {ideal} ({found.ideal})"
    out.print(title, markup=False)
    out.print("Shares are of the counted steps and the pauses between them.", markup=False)
    table = Table("part", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("time", "share", "lost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("proved by", overflow="fold")
    for part in found.parts:
        lost = format_seconds(part.lost_seconds) if abs(part.lost_seconds) >= 1e-6 else ""
        time, share = format_seconds(part.seconds), f"{part.fraction:.1%}"
        table.add_row(part.name, time, share, lost, part.counter)
    out.print(table)


def _show_wall(found: "Explanation") -> None:
    from paceline.cli.console import out
    from paceline.units import format_seconds

    whole = sum(part.seconds for part in found.wall)
    shown = ", ".join(
        f"{part.name} {format_seconds(part.seconds)} ({part.fraction:.0%})" for part in found.wall
    )
    out.print(f"wall   {format_seconds(whole)} from start to end: {shown}.", markup=False)
    rate, overall = found.samples_per_second, found.samples_per_second_with_pauses
    if overall < 0.98 * rate:
        text = f"rate   {rate:.4g} samples/s while training, {overall:.4g} with pauses."
        out.print(text, markup=False)


def _lines(found: "Explanation") -> list[str]:
    from paceline.explain.words import gain_text
    from paceline.units import format_seconds

    lines = [f"cause  {cause.text}." for cause in found.causes]
    learning = found.learning
    if learning is not None:
        lines.append(f"loss   {_learning_in_words(found)}")
    elif found.steps:
        lines.append("loss   not known; a script tells it by paceline.report_loss(loss).")
    for resource, word in zip(_binding(found), ("limit", "then"), strict=False):
        share = f"{resource.seconds / sum(part.seconds for part in found.parts):.0%}"
        lines.append(f"{word:<6} {resource.name}, needed {share} of the time ({resource.counter}).")
    if found.steps:
        lines.append(f"least  no step here is shorter than {format_seconds(found.limit_seconds)}.")
    lines += [f"next   {action.text}{gain_text(action.gain)}." for action in found.actions]
    if found.healthy:
        lines.append("next   nothing to mend; more workers or a faster device are what is left.")
    return lines


def _binding(found: "Explanation") -> "list[Resource]":
    """The resource that binds, and the next one of another kind."""
    first = found.resources[:1]
    return [*first, *[r for r in found.resources if r.kind != first[0].kind][:1]]


def _learning_in_words(found: "Explanation") -> str:
    learning = found.learning
    assert learning is not None
    text = f"{learning.first:.4g} at first, {learning.last:.4g} at the end"
    if learning.not_finite_from is not None:
        text = f"{learning.first:.4g} at first, not a number from step {learning.not_finite_from}"
    if learning.seen_at_backward:
        text += " (of what backward() was called on)"
    if learning.chance is not None:
        text += f"; guessing is {learning.chance:.4g}"
    if learning.staleness is not None:
        text += f"; gradients are {learning.staleness:.2g} updates old on average"
    for pair, what in (
        (learning.at_equal_samples, "as many samples"),
        (learning.at_equal_seconds, "as much time"),
    ):
        if pair is not None:
            text += f"; after {what} {pair[0]:.4g}, the baseline {pair[1]:.4g}"
    return text + "."
