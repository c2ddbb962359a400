"""Charts as SVG and PNG files. Many are drawn by helper processes, one per core.

A helper reads its share of the charts from its input, so nothing of the caller is imported again.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import vl_convert

WORTH_PROCESSES = 40
"""A picture takes a third of a second of one core; from this many on, every core draws."""

SCALE = 2
"""Pixels of a PNG per pixel of the chart: sharp on today's screens and in print."""


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """A Vega-Lite chart with its data, and the file it becomes, less the ending."""

    path: str
    spec: dict[str, Any]


def draw_all(drawings: Sequence[Drawing]) -> None:
    """Write every drawing; returns when all are there."""
    cores = len(os.sched_getaffinity(0)) if len(drawings) >= WORTH_PROCESSES else 1
    if cores == 1:
        for drawing in drawings:
            draw(drawing)
        return
    with ThreadPoolExecutor(cores) as helpers:
        list(helpers.map(_help, [drawings[part::cores] for part in range(cores)]))


def draw(drawing: Drawing) -> None:
    svg = vl_convert.vegalite_to_svg(drawing.spec)
    Path(f"{drawing.path}.svg").write_text(svg, encoding="utf-8")
    Path(f"{drawing.path}.png").write_bytes(vl_convert.svg_to_png(svg, scale=SCALE))


def _help(drawings: Sequence[Drawing]) -> None:
    command = [sys.executable, "-c", "from paceline.report import drawing; drawing.help_out()"]
    subprocess.run(command, input=msgspec.json.encode(drawings), check=True)


def help_out() -> None:
    """All that a helper process does."""
    for drawing in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Drawing]):
        draw(drawing)
