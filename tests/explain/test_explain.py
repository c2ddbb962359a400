"""Each planted cause is named, a healthy run is called healthy, and the parts sum to the whole."""

import math

import msgspec
import pytest
import torch

from paceline import spec
from paceline.errors import RecordError
from paceline.explain import conclude, explain
from paceline.record import RecordedEvent, RunFolder, folder
from paceline.record.entries import NOT_FINITE
from paceline.session.observers.nonfinite import NonfiniteValues
from tests.support.synthetic import MB, Times, synchronous_run

HEALTHY = {}
PLANTED = {
    "healthy": HEALTHY,
    "slow-worker": {"slow": {"worker1": Times(forward=0.020, backward=0.036)}},
    "input": {"times": Times(input=0.020)},
    "slow-link": {
        "link": "100mbit",
        "exchange_bytes": 0.5 * MB,
        "exchange_seconds": 0.043,
    },
    "server": {
        "link": "1gbit",
        "workers": 4,
        "servers": 1,
        "architecture": "server",
        "exchange_bytes": MB,
        "exchange_seconds": 0.033,
    },
    "small-batch": {
        "batch": 1,
        "times": Times(forward=0.0004, backward=0.0005, overhead=0.0005, input=0.0001),
        "exchange_seconds": 0.002,
    },
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_planted_cause_is_named(tmp_path, planted):
    run = synchronous_run(tmp_path / "run", **PLANTED[planted])
    if planted == "small-batch":  # else what its exchange takes is not explained by anything
        for member in run.members():
            member.host = "one"
            run.write_member(member)
    found = explain(run)
    names = [cause.name for cause in found.causes]
    assert found.healthy == (planted == "healthy")
    assert names[:1] == ([] if planted == "healthy" else [planted])


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("with_baseline", [False, True], ids=["alone", "beside-baseline"])
def test_parts_sum_to_the_whole(tmp_path, planted, with_baseline):
    run = synchronous_run(tmp_path / "run", **PLANTED[planted])
    single = {"workers": 1, "architecture": "single"}
    baseline = synchronous_run(tmp_path / "single", **single) if with_baseline else None
    found = explain(run, baseline)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_seconds)
    assert sum(part.fraction for part in found.parts) == pytest.approx(1)
    lost = sum(part.lost_seconds for part in found.parts)
    assert lost == pytest.approx(found.step_seconds - found.ideal_seconds)
    assert all(part.counter for part in found.parts)


@pytest.mark.parametrize(
    ("reason", "times"),
    [("compute", Times(forward=0.030, backward=0.050)), ("input", Times(input=0.040))],
)
def test_the_late_worker_is_told_with_its_reason(tmp_path, reason, times):
    found = explain(synchronous_run(tmp_path / "run", workers=3, slow={"worker2": times}))
    assert found.late is not None
    assert (found.late.worker, found.late.reason) == ("worker2", reason)
    assert found.late.last_fraction == 1
    assert "worker2" in found.verdict
    assert reason in found.verdict


def test_clocks_that_differ_do_not_change_who_is_late(tmp_path):
    slow = {"worker1": Times(forward=0.030)}
    offsets = {"worker1": 5.0}
    found = explain(synchronous_run(tmp_path / "run", slow=slow, clock_offsets=offsets))
    assert found.late is not None
    assert found.late.worker == "worker1"
    assert found.late.seconds == pytest.approx(0.020, rel=0.1)


def test_chance_delays_are_nobodys_fault(tmp_path):
    found = explain(synchronous_run(tmp_path / "run", workers=4, jitter=1.5, steps=200))
    assert found.late is None
    assert found.causes[0].name == "jitter"


def test_a_slow_worker_is_nobodys_loss_when_nobody_waits(tmp_path):
    """The same files, but of workers that do not wait for each other."""
    slow = {"worker1": Times(forward=0.030)}
    run = synchronous_run(tmp_path / "run", slow=slow, architecture="server:mode=async", servers=1)
    assert "wait" not in [part.name for part in explain(run).parts]
    assert run.summary().breakdown_seconds["wait"] == 0


def test_the_limit_is_the_pace_of_whoever_is_waited_for(tmp_path):
    slow = {"worker1": Times(forward=0.030)}
    waited = explain(synchronous_run(tmp_path / "sync", slow=slow, jitter=0))
    free = "server:mode=async"
    unwaited = explain(
        synchronous_run(tmp_path / "async", slow=slow, architecture=free, servers=1, jitter=0)
    )
    assert waited.limit_seconds == pytest.approx(0.049)
    assert unwaited.limit_seconds == pytest.approx(0.029)


def test_the_gain_of_removing_a_wait_is_what_a_run_without_it_gives(tmp_path):
    slow = explain(
        synchronous_run(tmp_path / "slow", slow={"worker1": Times(forward=0.030)}, jitter=0)
    )
    even = explain(synchronous_run(tmp_path / "even", jitter=0))
    promised = next(a.gain for a in slow.actions if "pace" in a.text)
    assert promised.low < slow.step_seconds / even.step_seconds - 1 < promised.high


def test_a_smaller_batch_than_the_baselines_is_seen_in_its_compute(tmp_path):
    run = synchronous_run(
        tmp_path / "run", batch=4, times=Times(forward=0.006, backward=0.008), exchange_seconds=0
    )
    baseline = synchronous_run(tmp_path / "single", workers=1, architecture="single", batch=64)
    assert explain(run, baseline).causes[0].name == "small-batch"


def test_known_links_give_the_limit(tmp_path):
    run = synchronous_run(
        tmp_path / "run", link="1gbit", exchange_bytes=25 * MB, exchange_seconds=0.21
    )
    found = explain(run)
    assert found.limit_seconds == pytest.approx(8 * 25 * MB / 1e9, rel=0.05)
    assert found.resources[0].name.startswith("link of worker")


def test_two_runs_of_equal_speed_lose_nothing(tmp_path):
    run = synchronous_run(tmp_path / "run", exchange_seconds=0)
    baseline = synchronous_run(tmp_path / "single", workers=1, architecture="single")
    found = explain(run, baseline)
    assert found.healthy
    assert found.baseline == "single"
    assert "of ideal" in found.verdict


def test_better_than_a_sick_run_is_not_healthy(tmp_path):
    slow = {"worker2": Times(forward=0.030, backward=0.050)}
    sick = synchronous_run(tmp_path / "sick", workers=3, slow=slow, exchange_seconds=0.5)
    mended = synchronous_run(tmp_path / "mended", workers=3, slow=slow)
    found = explain(mended, sick)
    assert [cause.name for cause in found.causes] == ["slow-worker"]
    assert "Healthy" not in found.verdict


def test_a_gradient_that_is_no_number_is_told_where_no_loss_is(tmp_path):
    run = synchronous_run(tmp_path / "run", exchange_seconds=0)
    for member in run.members():
        steps = run.path / "members" / f"{member.name}.steps.jsonl"
        entries = [msgspec.structs.replace(step, loss=None) for step in run.steps(member.name)]
        steps.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    assert explain(run).healthy
    text = NonfiniteValues().complaint("worker0", 7, None, torch.tensor(math.inf))
    run.add_event(
        RecordedEvent(time_seconds=0.0, member="worker0", kind=NOT_FINITE, text=text, step=7)
    )
    assert explain(run).verdict.startswith("A gradient of worker0 is not finite at step 7")


def test_a_run_without_step_files_is_explained_from_its_summary(tmp_path):
    """What a prediction or a peer leaves: figures, but no steps."""
    run = synchronous_run(tmp_path / "run", exchange_seconds=0.05)
    for file in (run.path / "members").glob("*.steps.jsonl"):
        file.unlink()
    found = explain(run)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_seconds)
    assert found.step_seconds == pytest.approx(run.summary().step_seconds.median, rel=0.05)
    assert not found.healthy


def test_a_run_that_never_finished_a_step_cannot_be_explained(tmp_path):
    run = RunFolder.create(tmp_path / "run", spec.Experiment())
    with pytest.raises(RecordError, match="no finished step"):
        explain(run)
    assert not isinstance(conclude(run).verdict, str)


def test_the_conclusion_is_kept_in_the_summary(tmp_path):
    run = synchronous_run(tmp_path / "run", link="1gbit", exchange_bytes=MB)
    conclude(run)
    summary = run.summary()
    assert summary.verdict == explain(run).verdict
    assert summary.limit_seconds == pytest.approx(0.029, rel=0.05)


def test_a_run_is_read_once(tmp_path, monkeypatch):
    """Its parts are explained by themselves, from what was read already."""
    run = synchronous_run(
        tmp_path / "run", workers=3, steps=80, slow_steps=lambda s: 1 + 2 * (30 <= s < 60)
    )
    read = []
    lines = folder._lines
    monkeypatch.setattr(folder, "_lines", lambda path, kind: read.append(path) or lines(path, kind))
    assert explain(run).verdict.startswith("From step 30 to 60")
    assert read
    assert len(read) == len(set(read))
