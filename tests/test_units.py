"""Quantities as people write them."""

import pytest

from paceline import units
from paceline.errors import SpecError


@pytest.mark.parametrize(
    ("parse", "text", "number"),
    [
        (units.parse_bandwidth, "10gbit", 1e10),
        (units.parse_bandwidth, "100 Mbit/s", 1e8),
        (units.parse_bandwidth, "1.5Gbps", 1.5e9),
        (units.parse_bytes, "256KiB", 262144),
        (units.parse_bytes, "100MB", 100_000_000),
        (units.parse_bytes, "4096", 4096),
        (units.parse_seconds, "50us", 5e-5),
        (units.parse_seconds, "0ms", 0.0),
    ],
)
def test_what_is_read(parse, text, number):
    assert parse(text, "here") == pytest.approx(number)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bandwidth, "10"),
        (units.parse_bandwidth, "0gbit"),
        (units.parse_bandwidth, "-1gbit"),
        (units.parse_bytes, "0"),
        (units.parse_bytes, "3 parsecs"),
        (units.parse_seconds, "50"),
    ],
)
def test_what_is_refused(parse, text):
    with pytest.raises(SpecError, match="here: "):
        parse(text, "here")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.5e-4, "350 us"),
        (0.0124, "12.4 ms"),
        (3.2, "3.20 s"),
        (245, "4 min 05 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_how_times_are_written(seconds, text):
    assert units.format_seconds(seconds) == text


def test_how_rates_and_sizes_are_written():
    assert units.format_bandwidth(9.4e8) == "940 Mbit/s"
    assert units.format_bytes(1.02e8) == "102 MB"
