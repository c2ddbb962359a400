import random

from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.statistics import estimate, overlap

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=40))
def test_the_median_lies_in_its_interval(values):
    found = estimate(values)

    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_few_repeats_say_how_little_they_prove():
    assert estimate([3.0, 1.0, 2.0]).coverage == 0.75
    assert estimate([5.0]).coverage == 0.0


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    source = random.Random(7)
    held = 0
    for _ in range(2000):
        found = estimate([source.expovariate(1.0) for _ in range(15)])
        held += found.low <= 0.6931 <= found.high

    assert found.coverage >= 0.95
    assert abs(held / 2000 - found.coverage) < 0.02


def test_intervals_that_meet_leave_the_order_open():
    assert overlap(estimate([1.0, 2.0, 3.0]), estimate([3.0, 4.0, 5.0]))
    assert not overlap(estimate([1.0, 2.0]), estimate([3.0, 4.0]))
