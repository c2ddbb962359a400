"""`paceline search`: the best settings over many runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline.search.folder import SearchFolder
    from paceline.spec.search import Search, SearchQuestion

SETTINGS = {
    "context_settings": {"allow_interspersed_args": False},
    "epilog": "Examples: paceline search --try learning_rate=0.001..1:log --try batch=32,64,128 "
    "--model mnist-dnn --data mnist --steps 200; "
    "paceline search --goal throughput --try architecture=ring,server --try batch=32,64 "
    "--on tunnel --link 1gbit --device k80 --model resnet50 --workers 4; "
    "paceline search --try --lr=0.001..1:log train.py --epochs 3; "
    "paceline search --resume runs/…-search",
}


MOST_ROWS = 10


def command(
    file: Annotated[
        str | None,
        typer.Argument(
            help="An experiment file with a table [search], or your own Python script, "
            "followed by its arguments."
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, the same in every trial.")
    ] = None,
    tried: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="NAME=VALUES",
            help="A setting and its values; repeat it for each. VALUES: 0.001..1:log, 16..256 or "
            "32,64,128. NAME: a field of the experiment, --OPTION of a script, or "
            "setting.NAME for paceline.setting(NAME, default).",
        ),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            help="accuracy, loss, throughput, cost, time:loss=X or cost:loss=X (default: loss)."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Run at most this many trials (default: 20).")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(help="tpe, random or grid: how settings are chosen (default: tpe)."),
    ] = None,
    pruner: Annotated[
        str | None,
        typer.Option(
            help="median, asha, hyperband or none: which trials end early (default: median)."
        ),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Run this many trials at the same time (default: 1).")
    ] = None,
    price: flags.Price = None,
    predict: Annotated[
        bool | None,
        typer.Option(
            "--predict/--no-predict",
            help="Leave out settings that cannot win by prediction, with the goals throughput and "
            "cost (default: predict).",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the search: the same seed tries the same settings.")
    ] = None,
    model: flags.Model = None,
    data: flags.Data = None,
    data_dir: flags.DataDir = None,
    batch: flags.Batch = None,
    global_batch: flags.GlobalBatch = None,
    steps: flags.Steps = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    learning_rate: flags.LearningRate = None,
    architecture: flags.Architecture = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Workers of each trial (default: 1).")
    ] = None,
    servers: flags.Servers = None,
    threads: flags.Threads = None,
    on: flags.On = None,
    link: flags.Link = None,
    device: flags.Device = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the search in this folder where it stopped.")
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page.")] = True,
    out: flags.Out = None,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Search for the best settings over many runs, and write a page about it."""
    from paceline.cli import console, job
    from paceline.errors import SpecError
    from paceline.search.folder import SearchFolder
    from paceline.search.running import first_experiment
    from paceline.spec.search import check_names, parse_tried

    if resume is not None:
        if file or tried:
            problem = "the folder holds the question already."
            raise SpecError("--resume", problem, "leave the file and --try out.")
        _run(SearchFolder.open(resume), json=json, page=page)
        return
    changes = {
        "model": model,
        "data": data,
        "data_dir": data_dir,
        "batch": batch,
        "global_batch": global_batch,
        "steps": steps,
        "epochs": epochs,
        "architecture": architecture,
        "workers": workers,
        "servers": servers,
        "threads": threads,
        "engine": on,
        "link": link,
        "device": device,
        "optimizer": None if learning_rate is None else {"learning_rate": learning_rate},
    }
    asked = {
        "try": None if tried is None else parse_tried(tried),
        "goal": goal,
        "trials": trials,
        "sampler": sampler,
        "pruner": pruner,
        "parallel": parallel,
        "seed": seed,
        "predict": predict,
        **flags.priced(price),
    }
    question = _question(file, tuple(arguments or ()), changes, asked)
    check_names(question)
    first = first_experiment(question)
    job.check_applies(first)
    job.resolved(first)
    if dry_run:
        console.print_question(question, json=json)
        return
    path = console.new_run_path(f"search-{question.name}", out)
    _run(SearchFolder.create(path, question), json=json, page=page)


def _question(
    file: str | None, arguments: tuple[str, ...], changes: dict[str, Any], asked: dict[str, Any]
) -> "SearchQuestion":
    """Return the question that a file or a script and the flags make together."""
    import msgspec

    from paceline import spec
    from paceline.cli import job
    from paceline.spec.search import SearchQuestion, load_search, search_of

    given = {name: value for name, value in asked.items() if value is not None}
    if file is not None and file.endswith(".toml"):
        loaded = load_search(Path(file))
        base = loaded.experiment
        given = {**msgspec.to_builtins(loaded.search), **given}
    elif file is not None:
        script = spec.Script(path=str(Path(file).absolute()), arguments=arguments)
        job.check_script(script)
        base = spec.Experiment(name=Path(file).stem, workload=spec.Workload(script=script))
    else:
        base = spec.Experiment()
    return SearchQuestion(
        experiment=flags.experiment(base, changes), search=search_of(given, file or "search")
    )


def _run(folder: "SearchFolder", *, json: bool, page: bool) -> None:
    """Run what is left of a search, print its trials and its best, write its page."""
    from paceline import report
    from paceline.cli import console
    from paceline.errors import Interrupted
    from paceline.report.search import conclusion
    from paceline.search.running import Searching

    try:
        with _progress(folder) as watch:
            searching = Searching(folder, watch)
            entries = searching.run()
    except (KeyboardInterrupt, Interrupted):
        console.err.print(f"continue with: paceline search --resume {folder.path}", soft_wrap=True)
        raise
    question, best = folder.question(), folder.best(entries)
    if json:
        console.print_json(_answer(folder, question.search, entries))
    else:
        _print_table(folder)
        console.out.print(conclusion(question, entries, best), markup=False)
        if best is not None:
            verb = "train" if question.experiment.workload.script is None else "run"
            again = f"run it again: paceline {verb} {folder.path / 'best.toml'}"
            console.out.print(again, markup=False, soft_wrap=True)
    if page:
        written = report.write_search(folder, searching.importances())
        console.err.print(f"page: {written}", soft_wrap=True)


def _answer(folder: "SearchFolder", search: "Search", entries: list[Any]) -> dict[str, Any]:
    """Return the search as one JSON object."""
    import msgspec

    best = folder.best(entries)
    return {
        "format_version": 1,
        "folder": str(folder.path),
        "goal": search.goal,
        "best": None if best is None else msgspec.to_builtins(best),
        "trials": msgspec.to_builtins(entries),
    }


def _print_table(folder: "SearchFolder") -> None:
    """Print the best trials; why the others ended is on the page."""
    from rich import box
    from rich.table import Table

    from paceline.cli import console
    from paceline.report.search import table

    headings, rows = table(folder.question(), folder.entries())
    wanted = [n for n, h in enumerate(headings) if h != "why" and any(row[n] for row in rows)]
    shown = Table(box=box.SIMPLE_HEAD)
    for number in wanted:
        shown.add_column(headings[number], overflow="fold")
    for row in rows[:MOST_ROWS]:
        shown.add_row(*(row[number] for number in wanted))
    console.out.print(shown)


def _progress(folder: "SearchFolder") -> Any:
    """Return a context that shows how far the search is, on stderr."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.cli import console
    from paceline.search.running import SearchProgress

    def told(state: SearchProgress) -> str:
        best = "" if state.best is None else f"best {state.best.value:.4g} · "
        return best + "; ".join(state.running)

    @contextmanager
    def shown() -> Any:
        if not console.err.is_terminal:
            yield lambda state: console.err.print(
                f"search: trial {min(state.done + 1, state.total)} of {state.total}  {told(state)}",
                soft_wrap=True,
                markup=False,
            )
            return
        parts = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*parts, console=console.err, transient=True) as bar:
            task = bar.add_task("search", total=folder.question().search.trials)
            yield lambda state: bar.update(task, completed=state.done, description=told(state))

    return shown()
