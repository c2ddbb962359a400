"""A script of one's own with `on_loss = "continue"`: no launcher, and each worker may be killed.

A script cannot compute a step again. Who is left takes the mean over the samples that are left, the
record says how many were not seen, and from the next step on the batch is divided anew.
"""

import pytest

from tests.support.by_hand import Job

STEPS = 80


def run(tmp_path, architecture, *lost):
    job = Job(tmp_path, architecture, workers=3, servers=0, steps=STEPS)
    for environment in job._told.values():
        environment["PACELINE_ON_LOSS"] = "continue"
    with job:
        for name in lost:
            job.kill(name)
        for name, (status, said) in job.endings(but=lost[0]).items():
            assert status == (-9 if name in lost else 0), f"{name}: {said}"
    return job


def parts(job, name):
    return [int(line.split()[1]) for line in job.said(name).splitlines() if line[:5] == "step "]


def weights(job, name):
    return next(line for line in job.said(name).splitlines() if line.startswith("weights "))


@pytest.mark.parametrize(
    ("architecture", "lost"),
    [
        ("ring", "worker0"),
        pytest.param("ring", "worker1", marks=pytest.mark.slow),
        pytest.param("hybrid", "worker0", marks=pytest.mark.slow),
        pytest.param("hybrid", "worker2", marks=pytest.mark.slow),
        pytest.param("average:every=4", "worker0", marks=pytest.mark.slow),
    ],
)
def test_the_others_take_all_steps_with_equal_weights(tmp_path, architecture, lost):
    job = run(tmp_path, architecture, lost)
    one, other = (f"worker{rank}" for rank in range(3) if f"worker{rank}" != lost)
    assert weights(job, one) == weights(job, other)
    for name in (one, other):
        assert len(parts(job, name)) == STEPS
        assert parts(job, name)[0] == 4
        assert parts(job, name)[-1] == 6
    for own, theirs in zip(parts(job, one), parts(job, other), strict=True):
        assert own + theirs in (8, 12), "they divide a batch among others than those who are there"
    (event,) = [event for event in job.folder.events() if event.kind == "lost"]
    assert event.text.startswith(f"{lost} was lost in step ")
    unseen = event.samples
    both = zip(parts(job, one), parts(job, other), strict=True)
    lost_parts = sum(own + theirs == 8 for own, theirs in both)
    assert f"{unseen} samples were not seen" in event.text
    if architecture in ("ring", "hybrid"):
        # It was there for as many as it has told of, or for one more that it did not live to tell.
        without = lost_parts - len(parts(job, lost))
        assert unseen in (4 * without, 4 * (without - 1))
        assert without in (1, 2)


@pytest.mark.slow
def test_two_may_be_lost_at_once(tmp_path):
    job = run(tmp_path, "ring", "worker0", "worker2")
    assert len(parts(job, "worker1")) == STEPS
    assert parts(job, "worker1")[-1] == 12
