"""Quantities as people write them ("10gbit", "256KiB", "50us"), in and out.

Links are rated in bits per second, sizes in bytes, times in seconds. Inside the program every
quantity is a plain number whose name carries its unit.
"""

import re

from paceline.errors import SpecError

BITS_PER_SECOND = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

LARGEST_BYTES = 2**60
"""More than any machine has; what is above is a mistake."""

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]*)\s*")


def parse_bandwidth(text: str, where: str) -> float:
    """Return bits per second for text such as "10gbit"."""
    amount, unit = _split(text)
    name = re.sub("(it/s|its|ps)$", "it", unit.lower())
    if 0 < amount < 1e18 and name in BITS_PER_SECOND:
        return amount * BITS_PER_SECOND[name]
    if amount > 0 and unit in BYTES:
        problem = f'bandwidth "{text}" is in bytes, and links are rated in bits.'
        raise SpecError(where, problem, f'write "{amount * 8:g}{unit[0].lower()}bit".')
    problem = f'bandwidth "{text}" is not a rate above zero.'
    raise SpecError(where, problem, 'write a number and a unit, such as "100mbit" or "10gbit".')


def parse_bytes(text: str, where: str) -> int:
    """Return bytes for text such as "256KiB" or a plain number of bytes."""
    amount, unit = _split(text)
    by_lower = {name.lower(): size for name, size in BYTES.items()}
    size = by_lower.get(unit.lower() or "b")
    if size is not None and 0 < amount * size <= LARGEST_BYTES:
        return int(amount * size)
    raise SpecError(
        where,
        f'size "{text}" is not a size above zero that a machine can have.',
        'write it as "256KiB".',
    )


def parse_seconds(text: str, where: str) -> float:
    """Return seconds for text such as "50us" or "1.5s"; zero is allowed."""
    amount, unit = _split(text)
    if amount >= 0 and unit in SECONDS:
        return amount * SECONDS[unit]
    raise SpecError(
        where, f'time "{text}" has no known unit.', 'write it as "50us", "20ms" or "3s".'
    )


def format_bandwidth(bits_per_second: float) -> str:
    return _scaled(bits_per_second, "bit/s", 1000.0, ("", "k", "M", "G", "T"))


def format_bytes(size_bytes: float) -> str:
    return _scaled(size_bytes, "B", 1000.0, ("", "k", "M", "G", "T"))


def format_seconds(seconds: float) -> str:
    """Return a time in the unit a person would choose: 350 us, 12.4 ms, 3.20 s, 4 min 05 s."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds >= 0.9995:  # what three digits would round up to the next unit
        return f"{seconds:.2f} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def _split(text: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    return (float(match[1]), match[2]) if match else (-1.0, "")


def _scaled(amount: float, unit: str, base: float, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes[:-1]:
        if abs(amount) < 0.9995 * base:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= base
    return f"{amount:.3g} {prefixes[-1]}{unit}"
