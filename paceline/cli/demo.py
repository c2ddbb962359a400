"""`paceline demo`: the tour, in under three minutes. What `make demo` runs."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import flags

SETTINGS = {"epilog": "Example: paceline demo"}


def command(
    tunnel: Annotated[
        bool | None,
        typer.Option("--tunnel/--no-tunnel", help="On emulated hosts too; where rights allow."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each run.")] = None,
    out: flags.Out = None,
    json: flags.Json = False,
) -> None:
    """Train P1's network with single, ring and server, and say what limited it."""
    import msgspec

    from paceline import bench, spec
    from paceline.bench.compare import ComparisonFolder
    from paceline.cli import console, tables
    from paceline.errors import MissingError, SpecError
    from paceline.tunnel.namespaces import require_rights

    if steps is not None and steps < 1:
        raise SpecError("--steps", f"{steps} steps are none.", "write a number above zero.")

    demo = spec.load_comparison(Path(bench.__file__).parent / "demo.toml")
    try:
        if tunnel is not False:
            require_rights()
    except MissingError as error:
        if tunnel:
            raise
        console.err.print(f"without emulated hosts: {error}", markup=False)
        tunnel = False
    if tunnel is False:
        demo = msgspec.structs.replace(demo, more=())
    if steps is not None:
        short = tuple({**grid, "steps": steps} for grid in demo.more)
        demo = spec.vary(msgspec.structs.replace(demo, more=short), {"steps": steps}, {})
    folder = ComparisonFolder.create(console.new_run_path("demo", out), demo)
    tables.run(folder, {}, json=json)
