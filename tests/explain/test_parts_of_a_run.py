"""What is there for a part of a run, and what is wrong with what it learns."""

import random
from types import SimpleNamespace

import pytest

from paceline.explain import explain
from paceline.explain.inside import _longest_other
from paceline.explain.spans import Slowed
from paceline.record import RecordedEvent
from paceline.record.entries import TRACED
from tests.support.synthetic import Machine, Times, names, rewritten, synchronous_run


class TestSpans:
    @pytest.mark.parametrize(
        ("slow", "when"),
        [
            (lambda s: s < 40, "Until step 40"),
            (lambda s: 30 <= s < 60, "From step 30 to 60"),
            (lambda s: s >= 50, "From step 50 on"),
        ],
        ids=["first", "middle", "last"],
    )
    def test_a_straggler_for_a_part_of_the_run(self, tmp_path, slow, when):
        run = synchronous_run(
            tmp_path / "run", workers=3, steps=80, slow_steps=lambda s: 1 + 2 * slow(s)
        )
        found = explain(run)
        assert names(found)[0] == "slow-worker", found.verdict
        assert found.verdict.startswith(when)
        assert "waiting for worker0" in found.verdict
        assert "what changed for worker0" in found.actions[0].text

    def test_a_worker_whose_every_step_is_slow_is_compared_with_nothing(self):
        """One that joined late has no usual steps: the run's explanation must not fail on it."""
        worker = SimpleNamespace(entries=[SimpleNamespace(step=step) for step in range(10)])
        spans = [
            Slowed(worker="w", phase="forward", seconds=0.1, start=start, end=None, factor=2.0)
            for start in (None, 5)
        ]
        assert _longest_other(worker, spans[:1]) is None
        usual = _longest_other(worker, spans[1:])
        assert [step for step in range(10) if usual(step)] == [0, 1, 2, 3, 4]

    def test_a_straggler_that_comes_twice(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            workers=3,
            steps=100,
            slow_steps=lambda s: 1 + 2 * (20 <= s < 40 or 60 <= s < 90),
        )
        found = explain(run)
        assert names(found) == ["slow-worker"], found.verdict
        assert found.verdict.startswith("From step 60 to 90 and from step 20 to 40 (")
        assert found.verdict.count("waiting for worker0") == 1
        assert [a.text.partition(":")[0] for a in found.actions] == [
            "look at what changed for worker0 between steps 60 and 90",
            "look at what changed for worker0 between steps 20 and 40",
        ]

    def test_two_slow_parts_with_two_causes(self, tmp_path):
        """First worker0 computes slowly, later samples come late: each has its own steps."""
        run = synchronous_run(
            tmp_path / "run", workers=3, steps=100, slow_steps=lambda s: 1 + 2 * (20 <= s < 50)
        )

        def late_samples(name, entry):
            later = 0.06 * min(max(entry["step"] - 69, 0), 20)
            slow = 0.06 * (70 <= entry["step"] < 90)
            phases = entry["breakdown_seconds"]
            return {
                **entry,
                "start_seconds": entry["start_seconds"] + later - slow,
                "ready_seconds": entry["ready_seconds"] + later,
                "end_seconds": entry["end_seconds"] + later,
                "breakdown_seconds": {**phases, "input": phases["input"] + slow},
            }

        found = explain(rewritten(run, late_samples))
        assert set(names(found)) == {"slow-worker", "input"}, found.verdict
        texts = {cause.name: cause.text for cause in found.causes}
        assert texts["slow-worker"].startswith("from step 20 to 50 (")
        assert texts["input"].startswith("from step 70 to 90 (")

    def test_input_that_is_slow_at_first(self, tmp_path):
        """A cold disk; the mean over all steps would promise too much and say nothing of when."""
        run = synchronous_run(tmp_path / "run", workers=1, architecture="single", steps=80)

        def cold(name, entry):
            later = 0.06 * min(entry["step"] + 1, 40)
            slow = 0.06 * (entry["step"] < 40)
            phases = entry["breakdown_seconds"]
            return {
                **entry,
                "start_seconds": entry["start_seconds"] + later - slow,
                "end_seconds": entry["end_seconds"] + later,
                "breakdown_seconds": {**phases, "input": phases["input"] + slow},
            }

        found = explain(rewritten(run, cold))
        assert names(found)[0] == "input", found.verdict
        assert found.verdict.startswith("Until step 40")

    def test_steps_that_grow(self, tmp_path):
        run = synchronous_run(tmp_path / "run", steps=80, slow_steps=lambda s: 1 + s / 40)
        found = explain(run)
        assert names(found)[0] == "slowed", found.verdict
        assert found.verdict.startswith("Steps grow")
        assert "grows with every step of worker0" in found.actions[0].text

    def test_noise_is_no_part_of_a_run(self, tmp_path):
        chance = random.Random(1)
        run = synchronous_run(
            tmp_path / "run", steps=80, slow_steps=lambda s: 1 + 0.5 * chance.random()
        )
        assert " step " not in explain(run).verdict.partition(" of each ")[0].lower()


class TestCores:
    def test_loader_processes_take_the_cores(self, tmp_path):
        """Two workers on two cores, and four processes that decode pictures for them."""
        machine = Machine(
            cpu_fraction=0.98,
            children_cpu_fraction=0.7,
            cpu_wait_fraction=0.6,
            machine_cpu_fraction=2.0,
        )
        late = {"worker1": Times(forward=0.014, backward=0.025)}
        found = explain(synchronous_run(tmp_path / "run", cores=2, machine=machine, slow=late))
        assert names(found)[0] == "readers", found.verdict
        assert "1.4 of the 2 cores" in found.verdict
        assert "slow-worker" not in names(found)
        assert found.actions[0].gain.low > 0

    def test_a_leaner_script_frees_the_cores_it_filled(self, tmp_path):
        machine = Machine(cpu_fraction=0.98, machine_cpu_fraction=2.0)
        run = synchronous_run(
            tmp_path / "run", cores=2, machine=machine, times=Times(overhead=0.030)
        )
        found = explain(run)
        assert names(found)[0] == "overhead"
        assert found.actions[0].gain.high > 0.5


def test_a_step_that_tensorflow_compiles_anew(tmp_path):
    run = synchronous_run(tmp_path / "run", times=Times(overhead=0.30), script="train.py")
    assert explain(run).verdict.startswith("The script spends")
    told = "TensorFlow traced the step 10 times within 9 steps: for each Python number"
    run.add_event(RecordedEvent(time_seconds=1.0, member="worker0", text=told, kind=TRACED))
    found = explain(run)
    assert names(found)[0] == "overhead"
    assert found.verdict.startswith("TensorFlow traced the step 10 times within 9 steps, which")
    assert "tensors of one shape" in found.actions[0].text


class TestPauses:
    def test_who_makes_them_is_named(self, tmp_path):
        run = synchronous_run(tmp_path / "run", outside=lambda s: 0.3 * (s % 8 == 7))
        found = explain(run)
        assert names(found)[0] == "pauses"
        assert "pauses on worker0" in found.verdict
        assert found.actions[0].text.startswith("let worker0 make")


def with_rate(rate):
    return lambda name, entry: {**entry, "learning_rate": rate(entry["step"])}


def noisy(seed=0):
    chance = random.Random(seed)
    return lambda s: 1 + 0.02 * chance.gauss(0, 1)


def not_reached(run, lacking, frozen=None, **more):
    """Of 1000 weights 900 have no gradient, or are frozen."""
    member = run.members()[0]
    member.counters["reach"] = {
        "elements": 1000,
        "frozen": 900 - lacking if frozen is None else frozen,
        "without_gradient": lacking,
        "for_example": "body.0.weight",
        **more,
    }
    run.write_member(member)


class TestLearning:
    def test_a_rate_that_jumps_undoes_what_was_learnt(self, tmp_path):
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run",
            steps=120,
            script="train.py",
            losses=lambda s: (2.3 * 0.96**s if s < 80 else 2.3) * noise(s),
        )
        run = rewritten(run, with_rate(lambda s: 0.02 if s < 79 else 0.6))
        found = explain(run)
        assert names(found)[0] == "diverged", found.verdict
        assert "the learning rate rose from 0.02 to 0.6 at step 79" in found.verdict
        assert found.actions[0].text.startswith("keep the learning rate at 0.02")

    def test_a_rate_that_jumps_makes_numbers_that_are_none(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            steps=90,
            losses=lambda s: 2.3 - 0.005 * s if s < 74 else float("nan"),
            fields={"schedule": {"name": "step", "every_steps": 70, "factor": 40.0}},
        )
        run = rewritten(run, with_rate(lambda s: 0.05 if s < 70 else 2.0))
        found = explain(run)
        assert names(found)[0] == "not-finite"
        assert "rose from 0.05 to 2 at step 70" in found.verdict
        assert found.actions[0].change == {"schedule": {"name": "constant"}}

    def test_a_loss_that_does_not_move(self, tmp_path):
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run", steps=110, script="train.py", losses=lambda s: 28.9 * noise(s)
        )
        found = explain(rewritten(run, with_rate(lambda s: 1e-10)))
        assert names(found) == ["flat"], found.verdict
        assert "than 1e-10" in found.actions[0].text

    def test_a_rate_of_0_comes_before_what_costs_time(self, tmp_path):
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run",
            steps=80,
            script="train.py",
            losses=lambda s: 2.3 * noise(s),
            times=Times(input=0.030),
        )
        found = explain(rewritten(run, with_rate(lambda s: 0.0)))
        assert names(found) == ["flat", "input"], found.verdict
        assert "the learning rate is 0" in found.verdict

    def test_a_loss_without_a_floor(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", steps=80, script="train.py", losses=lambda s: -2.3 * 1.15**s
        )
        found = explain(run)
        assert names(found)[0] == "diverged", found.verdict
        assert "falls without an end" in found.verdict
        assert "sign" in found.actions[0].text

    def test_a_likelihood_may_be_below_zero(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", steps=80, script="train.py", losses=lambda s: 3.0 - 0.4 * s
        )
        assert "diverged" not in names(explain(run))

    @pytest.mark.parametrize(
        ("lacking", "words", "todo"),
        [
            (
                900,
                "no gradient comes to 90% of the weights (body.0.weight",
                "where the graph is cut",
            ),
            (0, "90% of the weights are frozen (body.0.weight", "unfreeze"),
        ],
        ids=["cut", "frozen"],
    )
    def test_weights_that_are_not_reached_come_before_what_costs_time(
        self, tmp_path, lacking, words, todo
    ):
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run",
            steps=110,
            script="train.py",
            losses=lambda s: 0.693 * noise(s),
            times=Times(input=0.030),
        )
        not_reached(run, lacking)
        found = explain(run)
        assert names(found) == ["flat", "input"], found.verdict
        assert words in found.verdict
        assert todo in found.actions[0].text

    def test_weights_that_do_not_move_come_before_what_costs_time(self, tmp_path):
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run",
            steps=110,
            script="train.py",
            losses=lambda s: 0.693 * noise(s),
            times=Times(input=0.030),
        )
        not_reached(run, 0, 0, moved=3e-9)
        found = explain(run)
        assert names(found) == ["flat", "input"], found.verdict
        assert "the weights do not move" in found.verdict
        assert "clipping" in found.actions[0].text
        not_reached(run, 0, 0, moved=0.2)
        found = explain(run)
        assert names(found) == ["input", "flat"], found.verdict
        assert "labels belong to their samples" in found.actions[1].text

    def test_gradients_that_are_never_cleared(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", steps=80, script="train.py", losses=lambda s: 2.3 * 1.1**s
        )
        not_reached(run, 0, 0, uncleared=True)
        found = explain(run)
        assert names(found)[0] == "diverged"
        assert "zero_grad()" in found.actions[0].text

    def test_a_cut_graph_is_told_of_where_the_rest_learns(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", steps=80, script="train.py", losses=lambda s: 2.3 * 0.98**s
        )
        not_reached(run, 900)
        found = explain(run)
        assert "But no gradient comes to 90% of the weights" in found.verdict
        not_reached(run, 0)
        assert "weights" not in explain(run).verdict

    @pytest.mark.parametrize("left", [0.6, 0.02], ids=["in some steps", "in one"])
    def test_samples_that_come_sorted(self, tmp_path, left):
        """Ten classes, one after the other: each is learnt, and the next one is new."""
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run",
            steps=100,
            script="train.py",
            losses=lambda s: (2.3 if s < 10 else 6.0) * max(left ** (s % 10), 0.001) * noise(s),
            times=Times(input=0.030),
        )
        found = explain(run)
        assert names(found) == ["sorted-samples", "input"], found.verdict
        assert "9 times (at step 10, 20, 30, …)" in found.verdict
        assert found.actions[0].text.startswith("shuffle the samples")

    @pytest.mark.parametrize(
        "loss",
        [
            lambda s: 2.3 * 0.97**s + 3.0 * (s % 25 == 24),  # one bad batch now and then
            lambda s: 2.3 * 0.97**s if s < 50 else 2.5 * 0.97 ** (s - 50),  # once
        ],
        ids=["bad-batches", "once"],
    )
    def test_a_loss_that_jumps_otherwise(self, tmp_path, loss):
        run = synchronous_run(tmp_path / "run", steps=100, script="train.py", losses=loss)
        assert "sorted-samples" not in names(explain(run))

    def test_a_rate_that_is_raised_again_and_again_is_no_order_of_samples(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            steps=100,
            script="train.py",
            losses=lambda s: (2.3 if s < 10 else 6.0) * 0.6 ** (s % 10),
        )
        run = rewritten(run, with_rate(lambda s: 0.1 * 0.8 ** (s % 10)))
        assert "sorted-samples" not in names(explain(run))

    def test_a_loss_that_moves_slowly(self, tmp_path):
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run",
            steps=110,
            script="train.py",
            losses=lambda s: (10.9 - 0.006 * s) * noise(s),
        )
        assert "flat" not in names(explain(run))

    def test_what_costs_time_comes_before_a_loss_that_does_not_move(self, tmp_path):
        noise = noisy()
        run = synchronous_run(
            tmp_path / "run",
            steps=110,
            script="train.py",
            losses=lambda s: 0.693 * noise(s),
            times=Times(input=0.030),
        )
        found = explain(run)
        assert names(found) == ["input", "flat"], found.verdict
        assert "And the loss stays at" in found.verdict


def own_losses(factor):
    """Each worker's loss is multiplied by what `factor` says of it."""
    return lambda name, entry: {**entry, "loss": entry["loss"] * factor(name, entry["step"])}


class TestSamples:
    def run(self, path, **changes):
        noise = noisy(3)
        known = [2.3 / (1 + 0.05 * s) * noise(s) for s in range(60)]
        return synchronous_run(
            path, steps=60, script="train.py", losses=known.__getitem__, **changes
        )

    def test_the_same_for_all(self, tmp_path):
        found = explain(self.run(tmp_path / "run"))
        assert names(found)[0] == "same-samples", found.verdict

    def test_others_for_each(self, tmp_path):
        chance = random.Random(4)
        run = rewritten(
            self.run(tmp_path / "run"), own_losses(lambda name, s: 1 + 0.02 * chance.gauss(0, 1))
        )
        assert explain(run).healthy

    def test_one_that_has_other_data(self, tmp_path):
        chance = random.Random(4)
        run = rewritten(
            self.run(tmp_path / "run"),
            own_losses(
                lambda name, s: (5 if name == "worker1" else 1) * (1 + 0.02 * chance.gauss(0, 1))
            ),
        )
        found = explain(run)
        assert names(found)[0] == "odd-worker", found.verdict
        assert "loss of worker1" in found.verdict

    def test_one_that_is_left_behind(self, tmp_path):
        """Its labels are random, so the better all fit the others', the worse it fares."""
        chance, noise = random.Random(4), noisy(3)
        own = {"worker0": lambda s: 2.3 - 0.008 * s, "worker1": lambda s: 2.3 + 0.002 * s}
        run = synchronous_run(tmp_path / "run", steps=160, script="train.py", losses=noise)
        run = rewritten(
            run,
            lambda name, entry: {
                **entry,
                "loss": own[name](entry["step"]) * (1 + 0.02 * chance.gauss(0, 1)),
            },
        )
        found = explain(run)
        assert names(found)[0] == "odd-worker", found.verdict
        assert "loss of worker1" in found.verdict
