"""`--on-loss continue`: what it is refused for, and which deaths a launcher lets be."""

import pytest

from paceline import engines, spec
from paceline.bench import drill
from paceline.errors import MemberError, SpecError
from paceline.explain import conclude
from paceline.explain.failure import failure
from paceline.launch.failures import (
    BEGUN,
    MemberFailures,
    check_on_loss,
    way_out,
    why_servers_are_needed,
)
from paceline.launch.last_words import Ending
from paceline.launch.process import MemberCommand
from paceline.record import MemberRecord, RecordedEvent, RunFolder, Step, checkpoints


def asked(architecture, workers=2, **cluster):
    return spec.Experiment(
        architecture=spec.parse_architecture(architecture),
        cluster=spec.Cluster(workers=workers, on_loss="continue", **cluster),
    )


@pytest.mark.parametrize(
    ("experiment", "complaint"),
    [
        (asked("pipeline"), "pipeline cannot go on without one of them"),
        (asked("hybrid:between=server"), "hybrid:between=server cannot go on without one of them"),
        (asked("server:placement=colocated,mode=async"), "cannot go on without one of them"),
        (
            asked("server:placement=colocated,transport=shm"),
            "takes weights with it: weights lie in",
        ),
        (asked("server:placement=colocated,compression=fp16"), "compression=fp16 leaves out"),
        (asked("server:placement=colocated", device="cuda"), "with it: workers compute on GPUs"),
        (asked("single", workers=1), "one worker, and nobody to go on"),
    ],
)
def test_what_nobody_could_do_is_refused_with_the_way_out(experiment, complaint):
    with pytest.raises(SpecError, match=complaint) as caught:
        check_on_loss(experiment)
    assert "--restarts" in caught.value.fix


@pytest.mark.parametrize(
    "kind", ["server", "server:mode=bounded", "server:placement=colocated", "ring", "hybrid"]
)
def test_what_can_be_done_is_not_refused(kind):
    check_on_loss(asked(kind))


def test_a_server_is_needed_that_is_the_only_one_or_takes_gradients_from_gpus():
    for servers in (0, 1):
        why = why_servers_are_needed(asked("server:transport=tcp", servers=servers))
        assert why == "there is no other server"
    on_gpus = asked("server:transport=tcp", servers=2, device="cuda")
    assert why_servers_are_needed(on_gpus).startswith("workers compute on GPUs")


def test_it_is_stop_unless_asked_otherwise():
    check_on_loss(spec.Experiment(architecture=spec.Pipeline(), cluster=spec.Cluster(workers=2)))
    assert not spec.Cluster().goes_on


def test_a_word_that_means_nothing_is_refused():
    with pytest.raises(SpecError, match='on_loss: "carry-on" is no value of it'):
        spec.from_tables({"cluster": {"on_loss": "carry-on"}}, "e.toml")


def test_a_launcher_lets_a_lost_server_be_where_others_have_what_it_had(tmp_path):
    def of(kind, servers=2):
        folder = RunFolder.create(tmp_path / f"{kind}{servers}", asked(kind, servers=servers))
        met = RecordedEvent(time_seconds=1.0, member="worker0", kind=BEGUN, text="met")
        losses = MemberFailures(folder, lambda text: None)
        folder.add_event(met)
        return losses

    others = ["worker0", "worker1", "server1"]
    losses = of("server:transport=tcp")
    assert losses.fatal([a_death("server0")], others) == []
    last = a_death("server1", time=40.0)
    assert losses.fatal([a_death("server0"), last], others[:2]) == [last], "there is no other"
    both = [a_death("server0"), a_death("server1")]
    assert of("server:transport=tcp,mode=sync").fatal(both, others[:2]) == both, "none is left"
    for needed in (of("server"), of("server:transport=tcp", 1), of("server:mode=bounded")):
        assert needed.fatal([a_death("server0")], others) == [a_death("server0")]


def a_death(name, status=-9, time=10.0):
    return Ending(name=name, status=status, time=time, lines=[], complaint=[])


@pytest.fixture
def begun(tmp_path):
    folder = RunFolder.create(tmp_path / "run", asked("server", servers=1))

    def begin():
        folder.add_event(RecordedEvent(time_seconds=1.0, member="worker0", kind=BEGUN, text="met"))

    return folder, begin


def test_a_launcher_lets_a_lost_worker_be_once_all_have_met(begun):
    folder, begin = begun
    said = []
    losses = MemberFailures(folder, said.append)
    others = ["worker0", "worker2", "server0"]
    assert losses.fatal([a_death("worker1")], others), "nobody can go on before they have met"
    begin()
    assert losses.fatal([a_death("worker1")], others) == []
    assert losses.fatal([a_death("worker1")], others) == []
    assert said == ["worker1 was ended by signal 9 (SIGKILL); 2 workers go on without it"]
    losses.record(1.0)
    (event,) = [event for event in folder.events() if event.kind == "lost"]
    assert event.member == "worker1", "nobody else has told it"


@pytest.mark.parametrize(
    ("death", "others"),
    [
        (a_death("server0"), ["worker0", "worker1"]),
        (a_death("worker1", status=2), ["worker0", "server0"]),
        (a_death("worker1"), ["server0"]),
    ],
    ids=["a server", "refused", "the last"],
)
def test_what_nobody_can_do_without_ends_the_job(begun, death, others):
    folder, begin = begun
    losses = MemberFailures(folder, print)
    begin()
    assert losses.fatal([death], others) == [death]


@pytest.mark.parametrize(
    ("name", "status", "steps", "ends_it"),
    [
        ("worker0", 1, 3, True),
        ("worker0", 1, 2, False),
        ("worker0", -9, 3, False),
        ("worker1", 1, 3, False),
    ],
    ids=["saving", "training", "killed", "another"],
)
def test_who_speaks_for_all_and_fails_behind_the_last_step_ends_the_job(
    begun, name, status, steps, ends_it
):
    folder, begin = begun
    for worker in ("worker0", "worker1"):
        folder.write_member(MemberRecord(name=worker, role="worker", host="h"))
        taken = range(steps if worker == name else 3)
        times = {"start_seconds": 0.0, "end_seconds": 1.0, "breakdown_seconds": {}, "samples": 1}
        folder.write_steps(worker, [Step(step=step, **times) for step in taken])
    losses = MemberFailures(folder, lambda text: None)
    begin()
    left = [other for other in ("worker0", "worker1", "server0") if other != name]
    assert losses.fatal([a_death(name, status=status)], left) == []
    if not ends_it:
        losses.record(1.0)
        return
    with pytest.raises(MemberError, match="worker0 exited 1"):
        losses.record(1.0)


def test_nobody_starts_in_the_place_of_the_lost_without_worker_0_to_ask(begun):
    folder, begin = begun
    replacements = [MemberCommand(name=f"worker{rank}", argv=(), environment={}) for rank in (3, 4)]
    losses = MemberFailures(folder, print, replacements)
    begin()
    others = ["worker0", "worker1", "worker2", "server0"]
    assert losses.fatal([a_death("worker1")], others) == []
    assert [one.name for one in losses.replacements_due] == ["worker3"]
    assert losses.fatal([a_death("worker1"), a_death("worker0")], others[2:]) == []
    assert [one.name for one in losses.replacements_due] == ["worker3"]


def test_a_loss_that_was_survived_is_not_blamed_later(begun):
    folder, begin = begun
    losses = MemberFailures(folder, print)
    begin()
    survived, later = a_death("worker1", time=10.0), a_death("server0", time=100.0)
    losses.fatal([survived], ["worker0", "server0"])
    assert losses.fatal([survived, later], ["worker0"]) == [later]
    at_once = a_death("server0", status=1, time=10.5)
    assert losses.fatal([survived, at_once], ["worker0"]) == [survived, at_once]


def test_who_is_killed_soon_after_another_is_the_one_that_ended_the_job(begun):
    folder, begin = begun
    losses = MemberFailures(folder, print)
    begin()
    first, second = a_death("worker1", time=10.0), a_death("worker2", time=14.0)
    assert losses.fatal([first], ["worker0", "worker2", "server0"]) == []
    server = a_death("server0", time=14.0)
    assert losses.fatal([first, server], ["worker0", "worker2"]) == [server]
    assert losses.fatal([first, second], ["worker0", "server0"]) == []
    said = ["error: exchange: server0: worker2 was lost"]
    echo = Ending(name="worker0", status=1, time=14.5, lines=said, complaint=said)
    assert losses.fatal([first, second, echo], ["server0"]) == [second, echo]


MISSED = MemberError(
    "worker1", 1, [], sentence="worker2 was lost in step 36, and mode=sync waits for every worker."
)


def after_steps(path, experiment):
    folder = RunFolder.create(path, experiment)
    folder.write_member(MemberRecord(name="worker0", role="worker", host="here", pid=1))
    step = Step(step=0, start_seconds=0, end_seconds=1, breakdown_seconds={}, samples=1)
    folder.write_steps("worker0", [step])
    return folder


@pytest.mark.parametrize(
    ("job", "error", "told"),
    [
        (("server", 3), MISSED, "--on-loss continue|--restarts"),
        (("ring", 3), MemberError("worker1", -9, ["its words"]), "--on-loss continue|--restarts"),
        (("pipeline", 3), MemberError("worker1", -9, []), "--restarts"),
        (("server", 3), MemberError("server0", -9, []), "--restarts"),
        (("ring", 2), MemberError("worker1", -9, [], beside={"worker0": -9}), "--restarts"),
        (("server", 3, {"restarts": 1}), MISSED, "--on-loss continue"),
        (("server", 3, {"on_loss": "continue"}), MISSED, "--restarts"),
        (("server", 3), MemberError("worker1", 1, ["ValueError: worker2 was lost"]), ""),
    ],
)
def test_the_end_of_a_job_names_the_flags_that_would_have_outlived_it(tmp_path, job, error, told):
    kind, workers, cluster = (*job, {})[:3]
    experiment = spec.replace(asked(kind, workers), **{"on_loss": "stop", **cluster})
    fix = way_out(error, after_steps(tmp_path / "run", experiment))
    known = ("--on-loss continue", "--restarts")
    assert [flag for flag in known if flag in fix] == [flag for flag in told.split("|") if flag]


def test_before_the_first_step_nobody_could_have_gone_on(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.replace(asked("ring"), on_loss="stop"))
    fix = way_out(MemberError("worker1", -9, []), folder)
    assert fix == "\n  fix: --restarts 3 starts all again."


def disturbed(
    kill, *, workers=3, servers=2, restarts=0, steps=120, kind="server:chunk=4KiB", **workload
):
    """A job of real processes in which somebody is killed."""
    asked = {"model": "tests.support.user_models:that_waits_for_its_faults", "input_shape": (123,)}
    asked |= {"data": "synthetic", "global_batch": 26, **workload}
    experiment = spec.Experiment(
        architecture=spec.parse_architecture(kind),  # small chunks, so that both serve some
        cluster=spec.Cluster(
            workers=workers, servers=servers, on_loss="continue", restarts=restarts
        ),
        workload=spec.Workload(steps=steps, **asked),
    )
    return drill.with_faults(experiment, [spec.parse_fault("kill", one) for one in kill])


def test_a_killed_worker_ends_nobody_and_the_record_tells_what_it_cost(tmp_path):
    said = []

    def output(member, stream, content):
        said.append((member, content.decode()))

    folder = engines.run(disturbed(["worker1@30"]), tmp_path / "run", output=output)
    assert folder.summary().status == "finished"
    assert folder.restarts() == [], "nobody was started again"
    states = {member.name: member.status for member in folder.members()}
    assert states == {
        **dict.fromkeys(("worker0", "worker2", "server0", "server1"), "finished"),
        "worker1": "lost",
    }
    (event,) = [event for event in folder.events() if event.kind == "lost"]
    assert event.member == "worker1"
    assert event.step >= 30
    parts = {name: {s.step: s.samples for s in folder.steps(name)} for name in states}
    divided = [step for step in range(event.step, 120) if parts["worker0"][step] == 9]
    assert divided == [event.step, event.step + 1], "the others share all from one step on"
    seen = sum(parts[name][step] for step in divided for name in ("worker0", "worker2"))
    assert event.samples == 2 * 26 - seen == folder.summary().samples_not_seen
    told = [text for member, text in said if member == "paceline"]
    assert told == ["worker1 was ended by signal 9 (SIGKILL); 2 workers go on without it\n"]
    assert failure(folder) == ""
    assert "orker1 was lost in step" in conclude(folder).verdict


@pytest.mark.parametrize(
    "workload",
    [
        {"optimizer": spec.Optimizer(name="adam", learning_rate=0.001)},
        {"optimizer": spec.Optimizer(momentum=0.9), "clip_norm": 1.0},
    ],
)
@pytest.mark.slow
def test_a_killed_servers_parameters_go_on_elsewhere_as_if_nothing_had_happened(tmp_path, workload):
    job, said = {"kind": "server:chunk=4KiB,transport=tcp", "workers": 2, "steps": 150}, []

    def output(member, stream, content):
        said.append((member, content.decode()))

    calm = engines.run(disturbed([], **job, **workload), tmp_path / "calm")
    folder = engines.run(
        disturbed(["server0@30"], **job, **workload), tmp_path / "run", output=output
    )
    assert folder.summary().status == "finished"
    assert folder.restarts() == []
    states = {member.name: member.status for member in folder.members()}
    assert states.pop("server0") == "lost"
    assert set(states.values()) == {"finished"}
    (event,) = [event for event in folder.events() if event.kind == "lost"]
    assert event.member == "server0"
    assert "the last one serves its parameters from then on" in event.text
    told = [text for member, text in said if member == "paceline"]
    assert told == ["server0 was ended by signal 9 (SIGKILL); 2 workers go on without it\n"]
    for name in ("worker0", "worker1"):
        losses = [[s.loss for s in one.steps(name)] for one in (calm, folder)]
        assert len(losses[0]) == 150
        assert losses[0] == losses[1], "the same bits at every step"


@pytest.mark.slow
def test_several_are_lost_at_once_and_one_after_the_other(tmp_path):
    kills = ["worker1@30", "worker2@30", "worker4@80"]
    folder = engines.run(disturbed(kills, workers=5), tmp_path / "run")
    assert folder.summary().status == "finished"
    lost = {event.member for event in folder.events() if event.kind == "lost"}
    assert lost == {"worker1", "worker2", "worker4"}
    assert folder.steps("worker0")[-1].samples == 13


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_restarts_a_new_worker_takes_the_place_of_the_lost(tmp_path):
    folder = engines.run(disturbed(["worker1@30"], restarts=1, steps=3000), tmp_path / "run")
    assert folder.summary().status == "finished"
    assert folder.restarts() == [], "nobody was started again"
    states = {member.name: member.status for member in folder.members()}
    assert states["worker3"] == "finished"
    steps = folder.steps("worker3")
    assert steps[-1].step == 2999
    assert folder.steps("worker0")[-1].samples == 9, "a third of the batch again"


@pytest.mark.slow
def test_who_cannot_be_done_without_is_named_and_restarts_help(tmp_path):
    with pytest.raises(MemberError, match="server0 was ended by signal 9"):
        engines.run(disturbed(["server0@30"]), tmp_path / "stops")
    folder = engines.run(disturbed(["server0@30"], restarts=1), tmp_path / "again")
    assert folder.summary().status == "finished"
    assert len(folder.restarts()) == 1


@pytest.mark.slow
def test_without_worker_0_the_next_one_writes_record_and_checkpoints(tmp_path):
    job = {"steps": 150, "checkpoint_every": 50, "optimizer": spec.Optimizer(momentum=0.9)}
    folder = engines.run(disturbed(["worker0@30"], **job), tmp_path / "run")
    assert folder.summary().status == "finished"
    assert folder.restarts() == [], "nobody was started again"
    (event,) = [event for event in folder.events() if event.kind == "lost"]
    assert event.member == "worker0"
    assert folder.steps("worker1")[-1].step == 149
    assert checkpoints.choose(folder.path).manifest.step == 150


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker0", "worker1"])
@pytest.mark.parametrize(
    "workload",
    [
        {"optimizer": spec.Optimizer(name="adam", learning_rate=0.001)},
        {"optimizer": spec.Optimizer(momentum=0.9), "clip_norm": 1.0},
    ],
    ids=["adam", "clips"],
)
def test_where_workers_serve_the_last_one_goes_on_alone(tmp_path, victim, workload):
    kind, steps = "server:placement=colocated,chunk=4KiB", 150
    experiment = disturbed(
        [f"{victim}@30"], kind=kind, workers=2, steps=steps, servers=0, **workload
    )
    folder = engines.run(experiment, tmp_path / "run")
    assert folder.summary().status == "finished"
    assert folder.restarts() == []
    (event,) = [event for event in folder.events() if event.kind == "lost"]
    assert event.member == victim
    left = "worker1" if victim == "worker0" else "worker0"
    parts = [step.samples for step in folder.steps(left)]
    assert parts == [13] * (event.step + 2) + [26] * (steps - event.step - 2)
    assert event.samples == 26
