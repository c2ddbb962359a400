"""Steps of a run that was started again: what counts, what was undone, what is a pause."""

from paceline.record import Step
from paceline.record.lives import RECOVERY, joined, undone


def step(number, start):
    return Step(
        step=number,
        start_seconds=start,
        end_seconds=start + 1.0,
        breakdown_seconds={},
        samples=8,
        loss=float(start),
    )


def test_without_a_restart_nothing_changes():
    entries = [step(0, 0.0), step(1, 1.0)]
    assert joined(entries, []) == entries
    assert undone(entries, []) == []


def test_a_step_that_was_done_again_counts_once_and_the_second_time():
    entries = [step(n, float(n)) for n in range(5)]  # a checkpoint before step 3, killed at 5.0
    entries += [step(n, 20.0 + n) for n in range(3, 8)]
    found = joined(entries, [6.0])
    assert [entry.step for entry in found] == list(range(8))
    assert found[3].loss == 23.0
    assert found[3].paused_seconds == {RECOVERY: 20.0}, "from the end of step 2 to the new step 3"
    assert not found[4].paused_seconds
    assert [entry.step for entry in undone(entries, [6.0])] == [3, 4]
    total = sum(entry.seconds + sum(entry.paused_seconds.values()) for entry in found)
    assert total == entries[-1].end_seconds - entries[0].start_seconds, "all time is somewhere"


def test_a_life_without_a_step_and_lives_that_lose_more_each_time():
    entries = [step(0, 0.0), step(1, 1.0), step(2, 2.0)]
    entries += [step(1, 11.0), step(2, 12.0)]
    entries += [step(0, 30.0), step(1, 31.0)]
    restarts = [4.0, 20.0, 25.0]  # in the second nothing was done
    assert [entry.start_seconds for entry in joined(entries, restarts)] == [30.0, 31.0]
    lost = [entry.start_seconds for entry in undone(entries, restarts)]
    assert lost == [1.0, 2.0, 0.0, 11.0, 12.0]
