"""What failures leave of a cluster's work, against a job that is failed by chance."""

import random

import pytest

from paceline.predict.curve import scaling_curve
from paceline.predict.failures import Failures, best_every, useful_fraction
from tests.predict.test_answers import asked


def by_chance(failures, hosts, step, checkpoint, segments=4000):
    """Steps that stay, as a share of the time, of a job whose hosts break at random."""
    chance = random.Random(1)
    between = failures.mtbf_seconds / hosts
    work = failures.every * step
    passed = 0.0
    for _ in range(segments):
        needed = work + checkpoint
        while (broken := chance.expovariate(1 / between)) < needed:
            passed += broken
            while (again := chance.expovariate(1 / between)) < failures.restart_seconds:
                passed += again  # breaks while it starts
            passed += failures.restart_seconds
        passed += needed
    return segments * work / passed


@pytest.mark.parametrize("hosts", [1, 100, 1000])
def test_the_closed_form_is_what_happens_by_chance(hosts):
    failures = Failures(mtbf_seconds=30 * 24 * 3600, every=2000, restart_seconds=120)
    closed = useful_fraction(failures, hosts, 0.5, 20)
    assert closed == pytest.approx(by_chance(failures, hosts, 0.5, 20), rel=0.03)


def test_no_other_number_of_steps_is_better_than_the_best():
    rare = Failures(mtbf_seconds=1e7)
    best = best_every(rare, 200, 0.4, 5.0)
    fractions = [
        useful_fraction(Failures(mtbf_seconds=1e7, every=every), 200, 0.4, 5.0)
        for every in (best // 2, best, best * 2)
    ]
    assert fractions[1] == max(fractions)


def test_a_curve_says_what_failures_leave():
    found = scaling_curve(asked(), [2, 512], Failures(mtbf_seconds=3600 * 24))
    few, many = found.points
    assert 1 > few.useful_fraction > many.useful_fraction > 0
    assert many.checkpoint_every < few.checkpoint_every
