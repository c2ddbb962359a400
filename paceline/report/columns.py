"""The table of a page: headings with units, and how a row fills each cell. Absent is empty."""

from collections.abc import Callable, Sequence

from paceline.bench.table import Row
from paceline.units import format_bytes, format_seconds

FACTORS: dict[str, Callable[[Row], str]] = {
    "run": lambda row: row.name,
    "architecture": lambda row: _with_versions(row),
    "model": lambda row: row.subject,
    "data": lambda row: row.data or "",
    "batch": lambda row: str(row.batch or ""),
    "workers": lambda row: str(row.workers),
    "servers": lambda row: str(row.servers or ""),
    "engine": lambda row: row.engine,
    "network": lambda row: row.link or "",
    "device": lambda row: row.device or "",
    "container": lambda row: row.container or "",
}
"""What was asked for. One that is the same in all rows is left out."""

FIGURES: dict[str, Callable[[Row], str]] = {
    "samples/s": lambda row: _rate(row),
    "with pauses": lambda row: _number(row.samples_per_second_with_pauses, "{:,.4g}"),
    "speed-up": lambda row: _number(row.speedup, "{:.2f}×"),
    "efficiency": lambda row: _number(row.efficiency, "{:.0%}"),
    "step": lambda row: _seconds(row.step_seconds),
    "jitter": lambda row: _seconds(row.jitter_seconds),
    "exposed exchange": lambda row: _seconds(row.exchange_exposed_seconds or None),
    "CPU (cores)": lambda row: _number(row.cpu_fraction, "{:.2f}"),
    "sent per step": lambda row: _sent(row),
    "packets per step": lambda row: _number(row.packets_per_step, "{:,.0f}"),
    "memory": lambda row: _bytes(row.max_rss_bytes),
    "epoch": lambda row: _seconds(row.epoch_seconds),
    "staleness": lambda row: _number((row.staleness or {}).get("mean"), "{:.2f}"),
    "loss": lambda row: _loss(row),
    "top-1": lambda row: _number((row.accuracy or {}).get("top1"), "{:.2%}"),
    "trains like single": lambda row: _alike(row),
}
"""What was measured. One that no row has is left out."""

ALWAYS = ("architecture", "workers")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings, and the cells of each row with figures."""
    timed = [row for row in rows if row.failed is None]
    factors = [
        name
        for name, text in FACTORS.items()
        if name in ALWAYS or len({text(row) for row in timed}) > 1
    ]
    figures = [name for name, text in FIGURES.items() if any(text(row) for row in timed)]
    fill = {**FACTORS, **FIGURES}
    headings = [*factors, *figures]
    return headings, [[fill[name](row) for name in headings] for row in timed]


def _with_versions(row: Row) -> str:
    if not row.versions:
        return row.architecture
    return f"{row.architecture} ({', '.join(f'{n} {v}' for n, v in row.versions.items())})"


def _rate(row: Row) -> str:
    rate = row.samples_per_second
    if rate is None:
        return ""
    spread = f" ({rate.low:,.0f} to {rate.high:,.0f})" if row.repeats > 1 else ""
    return f"{rate.median:,.1f}{spread}" if rate.median < 100 else f"{rate.median:,.0f}{spread}"


def _alike(row: Row) -> str:
    if row.trains_like_single is None:
        return ""
    if row.trains_like_single:
        return "yes"
    if row.loss_difference is None:
        return "no (not a number)"
    return f"no ({row.loss_difference:.1%} off)"


def _sent(row: Row) -> str:
    """Over links; gradients that moved through memory are counted, and said to be."""
    if row.memory_bytes_per_step:
        return f"{format_bytes(row.memory_bytes_per_step)} in memory"
    return _bytes(row.bytes_per_step)


def _loss(row: Row) -> str:
    if row.not_finite_from is not None:
        return f"none from step {row.not_finite_from}"
    return _number(row.loss_last, "{:.4f}")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _bytes(value: float | None) -> str:
    return "" if value is None else format_bytes(value)
