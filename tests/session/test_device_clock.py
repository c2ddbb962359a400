"""A device's steps and pauses, on events whose time the test moves."""

import pytest
import torch

from paceline.session.observers.device_clock import DeviceClock


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]

    class Moment:
        def __init__(self, enable_timing):
            self.ms = None

        def record(self):
            self.ms = 1e3 * now[0]

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.ms - self.ms

    monkeypatch.setattr(torch.cuda, "Event", Moment)
    clock = DeviceClock()

    def spend(phase, seconds):
        clock.enter(phase)
        now[0] += seconds

    return clock, spend, now


def test_a_pause_is_named_and_belongs_to_no_step(clock):
    clock, spend, now = clock
    spend("forward", 1.0)
    with clock.paused("checkpoint"):
        now[0] += 5.0
        clock.enter("evaluation")  # what a pause does inside is its own
    spend("update", 0.5)
    entry = clock.end_step(0, 8)
    clock.complete(entry)
    assert entry.paused_seconds == {"checkpoint": pytest.approx(5.0)}
    assert entry.breakdown_seconds == {"forward": pytest.approx(1.0), "update": pytest.approx(0.5)}
    assert entry.seconds == pytest.approx(1.5)


def test_evaluation_between_steps_and_after_the_last(clock):
    clock, spend, _ = clock
    spend("evaluation", 2.0)
    spend("forward", 1.0)
    entry = clock.end_step(0, 8)
    clock.complete(entry)
    assert entry.paused_seconds == {"evaluation": pytest.approx(2.0)}
    assert entry.seconds == pytest.approx(1.0)
    spend("evaluation", 3.0)
    assert clock.end_training() == {"evaluation": pytest.approx(3.0)}
