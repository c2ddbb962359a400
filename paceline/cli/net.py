"""`paceline net`: latency and bandwidth against message size, between all pairs of hosts."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = {
    "epilog": "Examples: paceline net --on tunnel --hosts 4 --link 1gbit,100us --json · "
    "on each host: paceline net --listen 0.0.0.0:7717, then paceline net --hosts a,b,c"
}

MOST_HOSTS = 64
"""In the tunnel: two thousand pairs, an hour or two."""


def command(
    hosts: Annotated[
        str | None,
        typer.Option(help="host[:port],… with an agent each; in the tunnel, how many."),
    ] = None,
    on: Annotated[str, typer.Option("--on", help="here or tunnel.")] = "here",
    link: flags.Link = None,
    listen: Annotated[str | None, typer.Option(help="Be the agent of this host.")] = None,
    largest: Annotated[str, typer.Option(help="Largest message.")] = "64MiB",
    chart: Annotated[Path | None, typer.Option(help="Draw the curves: .html or .svg.")] = None,
    json: flags.Json = False,
) -> None:
    """Measure round trips and bandwidth for messages of 1 byte to 64 MiB, all pairs."""
    from paceline.cli import console
    from paceline.tunnel.netpipe import SIZES_BYTES
    from paceline.units import parse_bytes

    if listen is not None:
        _listen(listen)
        return
    _check_request(on, link, chart)
    limit = parse_bytes(largest, "--largest")
    sizes = [size for size in SIZES_BYTES if size <= limit]
    pairs = []
    for pair in _pairs(on, hosts, link, sizes):
        pairs.append(pair)
        console.err.print(f"{pair['from']} - {pair['to']} measured")
    answer = {"format_version": 1, "on": on, "link": link, "pairs": pairs}
    if chart is not None:
        _draw(pairs, chart)
        console.err.print(f"chart in {chart}")
    if json:
        console.print_json({key: value for key, value in answer.items() if value is not None})
    else:
        _print(pairs)


def _check_request(on: str, link: str | None, chart: Path | None) -> None:
    """Before anything is measured: what would be left out, and what could not be written."""
    from paceline.cli import console
    from paceline.errors import SpecError
    from paceline.spec import parse_link

    if link is not None:
        parse_link(link, "--link")
        if on != "tunnel":
            problem = "real cables have the rate they have."
            raise SpecError("--link", problem, "leave it out, or add --on tunnel.")
    if chart is not None:
        console.check_target(chart, "--chart", may_exist=chart.is_file())
        if chart.suffix not in (".html", ".svg", ".png"):
            problem = f"{chart} is neither .html nor .svg nor .png."
            raise SpecError("--chart", problem, "write such as --chart net.svg.")


def _pairs(
    on: str, hosts: str | None, link: str | None, sizes: list[int]
) -> "Iterator[dict[str, Any]]":
    from paceline.errors import SpecError, suggest
    from paceline.spec import parse_link
    from paceline.tunnel import agents, netpipe

    if on == "tunnel":
        count = hosts or "2"
        if not count.isdecimal() or len(count) > 9 or int(count) < 2:
            problem = f'"{count}" is not a number of emulated hosts.'
            raise SpecError("--hosts", problem, "write 2 or more, such as --hosts 4.")
        if int(count) > MOST_HOSTS:
            problem = f"{count} hosts are {int(count) * (int(count) - 1) // 2:,} pairs to measure."
            raise SpecError("--hosts", problem, f"write {MOST_HOSTS} or fewer.")
        yield from agents.tunnel_pairs(int(count), parse_link(link or "1gbit", "--link"), sizes)
    elif on == "here" and hosts is None:
        yield from agents.local_pairs(sizes)
    elif on == "here":
        named = {name: netpipe.parse_address(name) for name in (hosts or "").split(",")}
        netpipe.wait_for(named, _key())
        for pair in netpipe.pairs(named):
            yield netpipe.ask_pair(named, *pair, sizes, _key())
    else:
        problem = f'"{on}" has no network to measure.'
        raise SpecError("--on", problem, suggest(on, ["here", "tunnel"]))


def _listen(text: str) -> None:
    import socket

    from paceline.cli import console
    from paceline.errors import SpecError
    from paceline.tunnel import netpipe

    key, address = _key(), netpipe.parse_address(text)
    try:
        listener = socket.create_server(address)
    except OSError as error:
        problem = f'"{text}" cannot be listened at: {error.strerror}.'
        raise SpecError(
            "--listen", problem, "write an address of this host: 0.0.0.0:7717."
        ) from None
    with listener:
        where = f"{address[0]}:{listener.getsockname()[1]}"
        console.err.print(f"agent at {where}; ctrl-C ends it")
        netpipe.serve(listener, key)


def _key() -> str:
    """The secret agents share, from the environment: a command line is for all to read."""
    from paceline.errors import MissingError

    key = os.environ.get("PACELINE_KEY")
    if not key:
        problem = "agents answer only with a key, and PACELINE_KEY is not set."
        fix = "export the same PACELINE_KEY on every host, such as from `openssl rand -hex 16`."
        raise MissingError(problem, fix)
    return key


def _print(pairs: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from paceline.cli import console
    from paceline.units import format_bandwidth, format_bytes, format_seconds

    for pair in pairs:
        table = Table(title=f"{pair['from']} - {pair['to']}", title_justify="left")
        for heading in ("message", "round trip", "one direction", "each of both"):
            table.add_column(heading, justify="right")
        for row in pair["rows"]:
            table.add_row(
                format_bytes(row["bytes"]),
                format_seconds(row["round_trip_seconds"]),
                format_bandwidth(row["bits_per_second"]),
                format_bandwidth(row["both_bits_per_second"]),
            )
        console.out.print(table)


def _draw(pairs: list[dict[str, Any]], path: Path) -> None:
    """NetPIPE's curve: bandwidth against message size, a line for each pair and direction."""
    import altair

    ways = {"bits_per_second": "one direction", "both_bits_per_second": "each of both"}
    rows = [
        {
            "bytes": row["bytes"],
            "Gbit/s": row[field] / 1e9,
            "pair": f"{pair['from']} - {pair['to']}",
            "traffic": name,
        }
        for pair in pairs
        for row in pair["rows"]
        for field, name in ways.items()
    ]
    chart = (
        altair.Chart(altair.Data(values=rows), title="Bandwidth against message size")
        .mark_line(point=True)
        .encode(
            x=altair.X("bytes:Q", scale=altair.Scale(type="log"), title="message, bytes"),
            y=altair.Y("Gbit/s:Q", scale=altair.Scale(type="log")),
            color="pair:N",
            strokeDash="traffic:N",
        )
        .properties(width=640, height=360)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(str(path), inline=True) if path.suffix == ".html" else chart.save(str(path))
