"""`ring` and `average` with `--on-loss continue`: the others go on in place, and as if undisturbed.

The built-in loop. A step that a loss has interrupted is made again on the whole batch: with another
sum, another step twice or a survivor with weights of its own, the losses and weights would be
others than those of a job that nobody left.
"""

import pytest
import torch

from tests.training.losing import DEATHS, Losing

ROUNDING = 1e-5
"""Sums of another number of parts round differently; a step left out or made twice is more than a
hundred times as much."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with Losing(tmp_path_factory.mktemp("undisturbed"), "ring") as job:
        job.end()
    return job


def difference(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def check_like(job, undisturbed, survivors):
    """Equal among each other to the bit, and to the undisturbed but for rounding."""
    first, *rest = (job.weights(name) for name in survivors)
    for other in rest:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert difference(first, undisturbed.weights("worker0")) < ROUNDING
    ours, theirs = job.losses(), undisturbed.losses()
    assert set(ours) == set(theirs)
    survivor_steps = [step.step for step in job.folder.steps(survivors[0])]
    assert survivor_steps == list(range(12))


def test_a_step_left_out_or_made_twice_would_be_noticed(tmp_path, undisturbed):
    with Losing(tmp_path, "ring", steps=11) as shorter:
        shorter.end()
    assert difference(shorter.weights("worker0"), undisturbed.weights("worker0")) > 100 * ROUNDING


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        ("worker1", "in the first forward pass"),
        ("worker2", "in the middle"),
        ("worker0", "inside an exchange"),
        ("worker0", "between backward and step"),
        ("worker1", "in the last step"),
    ],
)
def test_the_others_go_on_like_the_undisturbed(tmp_path, undisturbed, lost, how):
    with Losing(tmp_path, "ring", deaths={lost: [how]}) as job:
        job.end(lost)
    check_like(job, undisturbed, [name for name in job.members if name != lost])
    (event,) = job.events()
    assert event.text.startswith(f"{lost} was lost in step ")
    states = {member.name: member.status for member in job.folder.members()}
    assert states.pop(lost) == "lost"
    assert set(states.values()) == {"finished"}
