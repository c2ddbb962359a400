"""`ring`, `hybrid` and `average` with `--on-loss continue`: the others go on, as if undisturbed.

The built-in loop. A step that a loss has interrupted is made again on the whole batch: with another
sum, another step twice or a survivor with weights of its own, the losses and weights would be
others than those of a job that nobody left.
"""

import pytest
import torch

from paceline import engines, spec
from paceline.record import checkpoints, summarise
from tests.support.losing import STEPS, Losing

RING = "ring:bucket=64KiB"
"""Several buckets, of which some may be summed and some not."""

ROUNDING = 1e-5
"""Sums of another number of parts round differently; a step left out or made twice is more than a
hundred times as much."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with Losing(tmp_path_factory.mktemp("undisturbed"), RING) as job:
        job.end()
    return job


def difference(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def check_equal(job, survivors):
    """To the bit, among each other; and each step once."""
    first, *rest = (job.weights(name) for name in survivors)
    for other in rest:
        assert all(torch.equal(first[name], other[name]) for name in first)
    for name in survivors:
        assert [step.step for step in job.folder.steps(name)] == list(range(STEPS))


def check_like(job, undisturbed, survivors):
    """But for rounding."""
    check_equal(job, survivors)
    weights = job.weights(survivors[0])
    assert difference(weights, undisturbed.weights("worker0")) < ROUNDING
    if len(survivors) < len(job.folder.members()):
        (step,) = {event.step for event in job.events()[-1:]}
        ours, theirs = job.losses(), undisturbed.losses()
        for later in range(step, STEPS):  # the parts of those who are left are all of the batch
            assert ours[later] == pytest.approx(theirs[later], rel=1e-4)


def check_told(job, lost):
    """Who, at which step, and that each is known to be gone."""
    told = job.events()
    assert {event.text.partition(" was lost in step ")[0] for event in told} == set(lost)
    assert all(" on, agreed after " in event.text for event in told)
    states = {member.name: member.status for member in job.folder.members()}
    assert {name for name, state in states.items() if state == "lost"} == set(lost)
    assert {state for name, state in states.items() if name not in lost} == {"finished"}


def test_a_step_left_out_or_made_twice_would_be_noticed(tmp_path, undisturbed):
    with Losing(tmp_path, RING, steps=STEPS - 1) as shorter:
        shorter.end()
    assert difference(shorter.weights("worker0"), undisturbed.weights("worker0")) > 100 * ROUNDING


@pytest.mark.parametrize(
    ("deaths", "workers"),
    [
        ({"worker0": "inside an exchange"}, 3),
        pytest.param({"worker1": "in the first forward pass"}, 3, marks=pytest.mark.slow),
        pytest.param({"worker2": "in the middle"}, 3, marks=pytest.mark.slow),
        pytest.param({"worker0": "between backward and step"}, 2, marks=pytest.mark.slow),
        pytest.param({"worker1": "in the last step"}, 3, marks=pytest.mark.slow),
        pytest.param(
            {"worker0": "inside an exchange, late", "worker1": "between backward and step"},
            3,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"worker3": "inside an exchange", "worker1": "in the middle"}, 4, marks=pytest.mark.slow
        ),
    ],
)
def test_the_others_go_on_like_the_undisturbed(tmp_path, undisturbed, deaths, workers):
    with Losing(tmp_path, RING, workers=workers, deaths=deaths) as job:
        job.end(*deaths)
    check_like(job, undisturbed, [name for name in job.members if name not in deaths])
    check_told(job, deaths)


@pytest.mark.parametrize(
    ("hosts", "deaths"),
    [
        # A leader: its mate has nothing of the step, the other host all of it.
        ("aabb", {"worker2": "when leaders have summed"}),
        pytest.param("aaa", {"worker2": "inside an exchange"}, marks=pytest.mark.slow),
        pytest.param("aab", {"worker1": "inside an exchange, late"}, marks=pytest.mark.slow),
        pytest.param("aab", {"worker2": "inside an exchange"}, marks=pytest.mark.slow),
        pytest.param("abab", {"worker1": "in the middle"}, marks=pytest.mark.slow),
        pytest.param(
            "aabb", {"worker2": "in the middle", "worker3": "a step later"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "abb", {"worker1": "when it leads and has shared one bucket"}, marks=pytest.mark.slow
        ),
        pytest.param("aab", {"worker0": "when leaders have summed"}, marks=pytest.mark.slow),
        pytest.param("aab", {"worker0": "in the first forward pass"}, marks=pytest.mark.slow),
        pytest.param(
            "ab", {"worker0": "before it meets the others' weights"}, marks=pytest.mark.slow
        ),
        pytest.param("aa", {"worker0": "in the last step"}, marks=pytest.mark.slow),
        pytest.param(
            "aabb",
            {"worker0": "inside an exchange", "worker1": "inside an exchange, late"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_hosts_go_on_without_members_leaders_or_each_other(tmp_path, undisturbed, hosts, deaths):
    with Losing(tmp_path, "hybrid", workers=len(hosts), hosts=hosts, deaths=deaths) as job:
        job.end(*deaths)
    check_like(job, undisturbed, [name for name in job.members if name not in deaths])
    check_told(job, deaths)


@pytest.mark.slow
def test_inside_a_host_sums_are_handed_over_too(tmp_path, undisturbed):
    also = {"worker1": "stays behind its host in step 5"}
    deaths = {"worker2": "between backward and step"}
    with Losing(tmp_path, "hybrid", hosts="aaa", deaths=deaths, also=also) as job:
        job.end("worker2")
    check_like(job, undisturbed, ["worker0", "worker1"])


def test_statistics_see_a_batch_once_that_is_computed_twice(tmp_path):
    workload = {"model": "tests.support.user_models:normed", "input_shape": (3, 8, 8)}
    with Losing(tmp_path, RING, deaths={"worker1": "inside an exchange"}, **workload) as job:
        job.end("worker1")
    counts = [v for name, v in job.weights("worker0").items() if name.endswith("batches_tracked")]
    assert counts
    assert all(int(count) == STEPS for count in counts)


@pytest.mark.parametrize(
    ("lost", "behind", "step"),
    [
        ("worker1", "worker2", 5),
        pytest.param("worker2", "worker0", 5, marks=pytest.mark.slow),
        pytest.param("worker0", "worker1", STEPS - 1, marks=pytest.mark.slow),
    ],
)
def test_who_has_the_sums_hands_them_to_who_has_not(tmp_path, undisturbed, lost, behind, step):
    """The lost one had done its part of the step, so it counts, and on all alike."""
    how = "behind the last step" if step == STEPS - 1 else "between backward and step"
    also = {behind: f"stays behind in step {step}"}
    with Losing(tmp_path, RING, deaths={lost: how}, also=also) as job:
        job.end(lost)
    check_like(job, undisturbed, [name for name in job.members if name != lost])


def test_one_that_gives_up_on_the_others_is_not_a_loss(tmp_path):
    """Else the one that was silent for too long would go on alone when all others had given up."""
    with Losing(tmp_path, RING, also={"worker1": "gives up"}) as job:
        job.wait()
    for name, process in job.members.items():
        assert process.exitcode == 1, f"{name}: {job.said(name)}"
        assert "these weights cannot be" in job.said(name)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["worker0", "worker1"])
def test_lost_over_a_checkpoint_the_next_ones_are_whole(tmp_path, undisturbed, lost):
    with Losing(tmp_path, RING, deaths={lost: "in a checkpoint"}, checkpoint_every=6) as job:
        job.end(lost)
    check_like(job, undisturbed, [name for name in job.members if name != lost])
    assert checkpoints.choose(job.folder.path).manifest.step == STEPS


@pytest.mark.slow
def test_another_one_evaluates_and_saves_where_the_first_is_lost_over_it(tmp_path):
    workload = {"data": "shapes", "model": "tutorial-cnn", "evaluate": True, "checkpoint_every": 20}
    with Losing(tmp_path, RING, deaths={"worker0": "in the evaluation"}, **workload) as job:
        job.end("worker0")
    check_equal(job, ["worker1", "worker2"])
    results = {member.name: member.results for member in job.folder.members()}
    assert "top1" in results["worker1"]
    assert not results["worker2"]
    assert checkpoints.choose(job.folder.path).manifest.step == STEPS


@pytest.mark.parametrize(
    ("options", "deaths"),
    [
        ("every=3", {"worker0": "inside an exchange"}),
        pytest.param("every=3", {"worker2": "in the middle"}, marks=pytest.mark.slow),
        pytest.param("every=3,overlap=true", {"worker1": "in the middle"}, marks=pytest.mark.slow),
        pytest.param(
            "every=3,overlap=true", {"worker2": "inside an exchange"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "every=3,outer=nesterov", {"worker0": "in the last step"}, marks=pytest.mark.slow
        ),
        pytest.param("every=2,state=true", {"worker0": "in the middle"}, marks=pytest.mark.slow),
    ],
)
def test_those_who_average_go_on_with_the_mean_of_who_is_left(tmp_path, options, deaths):
    with Losing(tmp_path, f"average:{options}", deaths=deaths) as job:
        job.end(*deaths)
    survivors = [name for name in job.members if name not in deaths]
    check_equal(job, survivors)
    check_told(job, deaths)
    assert summarise(job.folder, "finished").samples_not_seen > 0


def test_the_mean_is_handed_over_too(tmp_path):
    also = {"worker2": "stays behind in step 5"}
    deaths = {"worker1": "a step later"}
    with Losing(tmp_path, "average:every=3", deaths=deaths, also=also) as job:
        job.end("worker1")
    check_equal(job, ["worker0", "worker2"])
    (event,) = job.events()
    assert event.step == 8, "worker 0 had ended the round of step 5 and was at the next"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_our_launcher_lets_the_others_go_on_without_worker_0(tmp_path):
    workload = {"model": "mnist-dnn", "data": "synthetic", "global_batch": 24, "steps": 1200}
    experiment = spec.Experiment(
        architecture=spec.Ring(),
        workload=spec.Workload(**workload),
        cluster=spec.Cluster(workers=2, on_loss="continue"),
        faults=(spec.parse_fault("kill", "worker0@100"),),
    )
    folder = engines.run(experiment, tmp_path / "run")
    assert folder.summary().status == "finished"
    assert [step.step for step in folder.steps("worker1")] == list(range(1200))
    (event,) = [event for event in folder.events() if event.kind == "lost"]
    assert event.text.startswith("worker0 was lost in step ")
