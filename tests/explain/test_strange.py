"""What nobody thought of at first: each test is a verdict that a stranger's run once got wrong."""

import msgspec
import pytest

from paceline import spec
from paceline.errors import RecordError
from paceline.explain import explain
from paceline.record import RecordedEvent, open_folder
from tests.support.synthetic import Machine, Times, names, rewritten, synchronous_run

CLASSES = {"num_classes": 10.0}
SLOW = Times(forward=0.030, backward=0.054)


class TestInTime:
    def test_a_device_that_becomes_slow_is_not_healthy(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", workers=1, architecture="single", slow_steps=lambda s: 1 + (s >= 25)
        )
        found = explain(run)
        assert names(found)[0] == "slowed", found.verdict
        assert "from step 25 on" in found.verdict.lower()
        assert "step 25" in found.actions[0].text

    def test_who_becomes_slow_is_named_and_not_called_always_slow(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", workers=3, slow_steps=lambda s: 1 + 2 * (s >= 25), steps=50
        )
        found = explain(run)
        assert names(found)[0] == "slow-worker", found.verdict
        assert found.verdict.startswith("From step 25 on")
        assert "waiting for worker0" in found.verdict
        assert "what changed for worker0 at step 25" in found.actions[0].text

    def test_steps_that_vary_have_not_become_slow(self, tmp_path):
        run = synchronous_run(tmp_path / "run", slow_steps=lambda s: 1 + (s % 3 == 0))
        assert "slowed" not in names(explain(run))

    def test_a_wait_by_chance_is_not_that_of_a_core(self, tmp_path):
        """Cores that are busy for 2 % of a step do not make it wait for a third of it."""
        busy = Machine(cpu_wait_fraction=0.02, machine_cpu_fraction=1.9, cpu_fraction=0.5)
        run = synchronous_run(
            tmp_path / "run", cores=2, machine=busy, slow_steps=lambda s: 1 + 4 * (s % 7 == 3)
        )
        found = explain(run)
        assert names(found)[0] == "intermittent", found.verdict
        assert "cpu-taken" not in names(found)


class TestWhoIsLate:
    def test_all_who_are_late_are_named(self, tmp_path):
        late = {"worker2": SLOW, "worker3": SLOW}
        found = explain(synchronous_run(tmp_path / "run", workers=4, slow=late))
        assert names(found)[0] == "slow-worker"
        assert "worker2 and worker3" in found.verdict
        assert "they are" in found.verdict

    def test_more_samples_are_not_a_slow_device(self, tmp_path):
        run = synchronous_run(tmp_path / "run", slow={"worker1": SLOW})

        def triple(name, entry):
            return {**entry, "samples": 96} if name == "worker1" else entry

        found = explain(rewritten(run, triple))
        assert found.late.reason == "share", found.verdict
        assert "3.0 times the typical worker's samples" in found.verdict
        assert found.actions[0].change == {"shares": [1.0, 1.0]}

    def test_what_one_worker_does_between_steps(self, tmp_path):
        late = {"worker1": Times(overhead=0.080)}
        found = explain(synchronous_run(tmp_path / "run", slow=late))
        assert found.late.reason == "overhead"
        assert "something else between steps" in found.verdict
        assert "times the typical" not in found.verdict


class TestExchange:
    def test_one_cable_with_a_delay(self, tmp_path):
        hosts = [{"count": 2}, {"link": "1gbit,20ms"}]
        run = synchronous_run(
            tmp_path / "run",
            workers=3,
            link="1gbit",
            exchange_seconds=0.080,
            exchange_bytes=10_000,
            fields={"hosts": hosts},
        )
        found = explain(run)
        assert names(found)[0] == "latency", found.verdict
        assert "worker2's cable" in found.verdict
        link = [host.get("link", "") for host in found.actions[0].change["hosts"]]
        assert link == ["", "", ""]

    def test_pieces_that_are_too_small(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            servers=1,
            architecture="server:chunk=4KiB",
            exchange_seconds=0.080,
            server_cpu_fraction=0.95,
        )
        found = explain(run)
        assert names(found)[0] == "transport", found.verdict
        assert found.actions[0].change == {"architecture": "server"}

    def test_a_quorum_that_is_too_small(self, tmp_path):
        counted = {
            "staleness": {f"worker{n}": {"0": 40} for n in range(4)},
            "late_gradients": {"worker1": 40, "worker2": 40, "worker3": 40},
        }
        run = synchronous_run(
            tmp_path / "run",
            workers=4,
            servers=1,
            architecture="server:mode=quorum,quorum=1",
            counters={"server0": counted},
        )
        found = explain(run)
        assert names(found)[0] == "late-work"
        assert found.verdict.startswith("75% of the gradients come too late")
        assert found.actions[0].change == {"architecture": "server:mode=quorum,quorum=3"}

    def test_an_optimizer_that_takes_longer_than_computing(self, tmp_path):
        run = synchronous_run(tmp_path / "run", times=Times(update=0.080))
        found = explain(run)
        assert names(found)[0] == "small-batch", found.verdict
        assert "the optimizer's update" in found.verdict


class TestAroundTheSteps:
    def test_a_run_that_mostly_starts_says_so(self, tmp_path):
        run = synchronous_run(tmp_path / "run")
        summary = run.summary()
        summary.wall_seconds = {"start-up": 60.0, "steps": 1.2, "teardown": 1.0}
        run.write_summary(summary)
        assert "1 min 00 s of 1 min 02 s in all went before the first step" in explain(run).verdict

    def test_a_verdict_on_one_step_says_so(self, tmp_path):
        found = explain(synchronous_run(tmp_path / "run", steps=3))
        assert "only one step was counted" in found.verdict

    def test_a_run_that_was_started_again(self, tmp_path):
        run = synchronous_run(tmp_path / "run")
        text = "worker1 was ended by signal 9 (SIGKILL); all members start again"
        run.add_event(RecordedEvent(time_seconds=0.0, member="launcher", kind="restart", text=text))
        found = explain(open_folder(run.path))
        assert names(found)[0] == "lost"
        assert found.verdict.startswith("Worker1 was ended by signal 9")


class TestPeers:
    """Another framework whose gradients we exchange is explained; strangers tell too little."""

    def keras(self, path, change=lambda name, entry: entry):
        run = synchronous_run(path, slow={"worker1": SLOW})
        summary = run.summary()
        summary.architecture = "keras-ring"
        run.write_summary(summary)
        return rewritten(run, change)

    def test_our_exchange_under_another_framework(self, tmp_path):
        found = explain(self.keras(tmp_path / "run"))
        assert found.architecture == "keras-ring"
        assert names(found)[0] == "slow-worker"

    def test_a_stranger(self, tmp_path):
        def untold(name, entry):
            return {**entry, "breakdown_seconds": {"input": 0.001}}

        with pytest.raises(RecordError, match="what happens inside its steps"):
            explain(self.keras(tmp_path / "run", untold))


def test_every_stage_of_a_pipeline_waits(tmp_path):
    run = synchronous_run(tmp_path / "run", architecture="ring")
    experiment = run.experiment()
    kind = spec.Pipeline(microbatches=1, schedule="gpipe")
    changed = msgspec.structs.replace(experiment, architecture=kind)
    (run.path / "experiment.toml").write_text(spec.to_toml(changed))
    summary = run.summary()
    summary.architecture = spec.format_architecture(kind)
    run.write_summary(summary)

    def waiting(name, entry):
        breakdown = {**entry["breakdown_seconds"], "wait": 0.030, "exchange_exposed": 0.001}
        return {
            **entry,
            "end_seconds": entry["end_seconds"] + 0.030,
            "breakdown_seconds": breakdown,
        }

    found = explain(rewritten(run, waiting))
    assert names(found)[0] == "bubble", found.verdict
    assert "microbatches=4" in found.actions[0].text


class TestGuessing:
    def test_a_first_step_that_throws_the_loss_far_off_is_no_learning(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            steps=80,
            losses=lambda s: 300.0 if s in (1, 2) else 2.30,
            results=CLASSES,
        )
        assert names(explain(run))[0] == "chance"

    def test_a_loss_that_is_on_its_way_past_guessing_learns(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", steps=60, losses=lambda s: 3.5 - 0.02 * s, results=CLASSES
        )
        assert explain(run).healthy


def test_two_workers_on_the_cores_of_one(tmp_path):
    """Alone a worker computes with both cores; two workers have one each; nobody is to blame."""
    half = Times(forward=0.020, backward=0.036)
    busy = Machine(cpu_fraction=0.9, cpu_wait_fraction=0.05, machine_cpu_fraction=2.0)
    one = synchronous_run(
        tmp_path / "one", workers=1, architecture="single", cores=2, machine=Machine()
    )
    two = synchronous_run(tmp_path / "two", times=half, cores=2, machine=busy)
    found = explain(two, one)
    assert names(found)[0] == "cores", found.verdict
    assert "workers share the 2 cores" in found.verdict
    assert "one worker alone has all 2 cores" in found.actions[0].text
