"""A script on several workers that did not share its work is told so."""

import pytest

from paceline import spec
from paceline.record import MemberRecord, RecordedEvent, RunFolder, Step
from paceline.record.following import recorded
from paceline.record.script import warning


def experiment(workers=2, architecture=None):
    return spec.Experiment(
        workload=spec.Workload(script=spec.Script(path="/a/train.py")),
        architecture=architecture or spec.Ring(),
        cluster=spec.Cluster(workers=workers),
    )


def members(*calls):
    """Workers with what each counted; None for a version that counted nothing."""
    return [
        MemberRecord(
            name=f"worker{rank}",
            role="worker",
            host="h",
            counters={} if call is None else {"script": call},
        )
        for rank, call in enumerate(calls)
    ]


ALL, NO_SHARD = {"distributed": 1, "sharded": 1}, {"distributed": 1, "sharded": 0}
NOTHING = {"distributed": 0, "sharded": 0}


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (members(), "train.py never called paceline.init()"),
        (members(NOTHING, NOTHING), "never called paceline.distribute()"),
        (members(NO_SHARD, NO_SHARD), "never called paceline.shard()"),
        (members(ALL, ALL), ""),
        (members(None, None), ""),
    ],
)
def test_what_was_never_called_is_named(own, told):
    found = warning(experiment(), own, {})
    assert told in found
    assert bool(found) == bool(told)
    assert warning(experiment(workers=1), own, {}) == "", "one worker shares with nobody"
    assert warning(spec.Experiment(cluster=spec.Cluster(workers=2)), own, {}) == ""


def test_a_script_whose_optimizer_never_stepped_is_told_that_nothing_was_exchanged():
    own = members(ALL, ALL)
    assert "train.py took no step" in warning(experiment(), own, {"worker0": 0, "worker1": 0})
    assert warning(experiment(), own, {"worker0": 1, "worker1": 1}) == ""


def test_workers_in_step_take_as_many_steps():
    steps = {"worker0": 8, "worker1": 3}
    assert "worker0 8, worker1 3" in warning(experiment(), members(ALL, ALL), steps)
    never_in = {"worker0": 8, "worker1": 8, "worker2": 0}
    assert warning(experiment(), members(ALL, ALL), never_in) == "", "the job ended as it came"
    free = experiment(architecture=spec.Server(mode="async"))
    assert warning(free, members(ALL, ALL), steps) == ""


def test_the_record_keeps_it(tmp_path):
    folder = RunFolder.create(tmp_path / "run", experiment())
    with recorded(folder):
        for number, member in enumerate(members(ALL, ALL)):
            folder.write_member(member)
            step = Step(
                step=number, start_seconds=0, end_seconds=1, breakdown_seconds={}, samples=1
            )
            lines = folder.path / "members" / f"{member.name}.steps.jsonl"
            lines.write_text("".join(_encoded(step) for _ in range(number + 1)), encoding="utf-8")
    (note,) = folder.summary().notes
    assert "different numbers of steps (worker0 1, worker1 2)" in note
    assert [event.kind for event in folder.events()] == ["warning"]
    assert isinstance(folder.events()[0], RecordedEvent)


def _encoded(step):
    import msgspec

    return msgspec.json.encode(step).decode() + "\n"
