"""From the members' files to figures."""

import msgspec
import pytest

from paceline import spec
from paceline.errors import RecordError
from paceline.record import (
    MemberRecord,
    RunFolder,
    Step,
    losses,
    open_folder,
    split_wait,
    summarise,
)


def step(number, *, start, ready, end, exposed, samples=10, loss=1.0):
    return Step(
        step=number,
        start_seconds=start,
        end_seconds=end,
        ready_seconds=ready,
        breakdown_seconds={"forward": ready - start, "exchange_exposed": exposed},
        samples=samples,
        loss=loss,
    )


def test_waiting_for_the_slowest_is_told_from_exchanging():
    fast = [step(0, start=0.0, ready=1.0, end=4.0, exposed=3.0)]
    slow = [step(0, start=0.0, ready=3.0, end=4.0, exposed=1.0)]
    split = split_wait({"worker0": fast, "worker1": slow}, {})
    assert split["worker0"][0].breakdown_seconds["wait"] == pytest.approx(2.0)
    assert split["worker0"][0].breakdown_seconds["exchange_exposed"] == pytest.approx(1.0)
    assert split["worker1"][0].breakdown_seconds["wait"] == pytest.approx(0.0)


def test_clocks_of_other_hosts_are_aligned_before_they_are_compared():
    one = [step(0, start=0.0, ready=1.0, end=2.0, exposed=1.0)]
    other = [step(0, start=100.0, ready=101.5, end=102.0, exposed=0.5)]
    split = split_wait({"worker0": one, "worker1": other}, {"worker1": -100.0})
    assert split["worker0"][0].breakdown_seconds["wait"] == pytest.approx(0.5)


def test_a_loss_is_the_mean_over_the_global_batch():
    uneven = {
        "worker0": [step(0, start=0, ready=1, end=1, exposed=0, samples=30, loss=1.0)],
        "worker1": [step(0, start=0, ready=1, end=1, exposed=0, samples=10, loss=5.0)],
    }
    assert losses(uneven) == {0: pytest.approx(2.0)}


def test_a_step_some_workers_have_not_reported_has_no_loss_yet():
    two = [step(n, start=n, ready=n, end=n + 1, exposed=0) for n in range(2)]
    assert list(losses({"worker0": two, "worker1": two[:1]})) == [0]


def test_a_worker_that_joined_is_not_waited_for_before_its_first_step():
    three = [step(n, start=n, ready=n, end=n + 1, exposed=0) for n in range(3)]
    assert list(losses({"worker0": three, "worker1": three[1:]})) == [0, 1, 2]
    assert list(losses({"worker0": three, "worker1": three[1:2]})) == [0, 1]
    assert not losses({"worker0": three, "worker1": []})


def test_a_lost_worker_is_not_waited_for_after_its_last_words():
    three = [step(n, start=n, ready=n, end=n + 1, exposed=0) for n in range(3)]
    reports = {"worker0": three, "worker1": three[:1], "worker2": three[:2]}
    assert list(losses(reports, {"worker1": 1})) == [0, 1]
    assert list(losses(reports, {"worker1": 2})) == [0]  # the last one's words were not written


@pytest.fixture
def folder(tmp_path):
    experiment = spec.Experiment(
        architecture=spec.Ring(),
        cluster=spec.Cluster(workers=2),
        measurement=spec.Measurement(warmup_steps=1),
    )
    folder = RunFolder.create(tmp_path / "run", experiment)
    for name, slow_start in (("worker0", 9.0), ("worker1", 9.0)):
        folder.write_member(MemberRecord(name=name, role="worker", host="a", status="finished"))
        steps = [step(0, start=0.0, ready=slow_start, end=slow_start, exposed=0)]
        steps += [
            step(n, start=8.0 + n, ready=8.5 + n, end=9.0 + n, exposed=0.5, loss=1 / (n + 1))
            for n in (1, 2)
        ]
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in steps)
        (folder.path / "members" / f"{name}.steps.jsonl").write_bytes(lines + b'{"cut sho')
    return folder


def test_figures_leave_out_the_warm_up_and_add_up_the_workers(folder):
    summary = summarise(folder, "finished")
    assert summary.samples_per_second == pytest.approx(20.0)
    assert summary.step_seconds.median == pytest.approx(1.0)
    assert summary.breakdown_seconds["forward"] == pytest.approx(0.5)
    assert (summary.loss.first, summary.loss.last) == (pytest.approx(1.0), pytest.approx(1 / 3))
    assert summary.workers == 2
    assert open_folder(folder.path).summary() == summary


@pytest.mark.parametrize("half", [slice(0, 5), slice(5, 10)], ids=["lost", "joined"])
def test_who_was_there_half_of_the_time_counts_half(tmp_path, half):
    experiment = spec.Experiment(
        cluster=spec.Cluster(workers=2), measurement=spec.Measurement(warmup_steps=0)
    )
    folder = RunFolder.create(tmp_path / "run", experiment)
    seconds = [step(n, start=n, ready=n + 1, end=n + 1, exposed=0) for n in range(10)]
    for name, steps in {"worker0": seconds, "worker1": seconds[half]}.items():
        status = "lost" if len(steps) == 5 and half.start == 0 else "finished"
        folder.write_member(MemberRecord(name=name, role="worker", host="a", status=status))
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in steps)
        (folder.path / "members" / f"{name}.steps.jsonl").write_bytes(lines)
    assert summarise(folder, "finished").samples_per_second == pytest.approx(15.0)


def test_unknown_is_absent(folder):
    text = (folder.path / "run.json").read_text(encoding="utf-8")
    summarise(folder, "failed")
    assert '"accuracy"' not in text
    assert '"speedup"' not in (folder.path / "run.json").read_text(encoding="utf-8")


def test_nothing_is_written_where_it_is_known_to_be_nothing(folder):
    summary = folder.summary()
    summary.steps, summary.samples_not_seen, summary.notes, summary.accuracy = 0, 0, [], {}
    folder.write_summary(summary)
    written = msgspec.json.decode((folder.path / "run.json").read_bytes())
    told = {"steps": 0, "samples_not_seen": 0, "notes": [], "accuracy": {}, "name": ""}
    assert {name: written.get(name) for name in told} == told
    assert None not in written.values()
    assert folder.summary() == summary


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"no run\.json"):
        open_folder(tmp_path)
    (tmp_path / "run.json").write_text('{"format_version": 99}', encoding="utf-8")
    with pytest.raises(RecordError, match="format version 99"):
        open_folder(tmp_path)
