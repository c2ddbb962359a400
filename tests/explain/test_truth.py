"""Never "healthy" of a sick run; the right one is named and nobody else; all time is accounted for.

Every test here is a sentence that was once wrong, with the record that showed it.
"""

import math
import platform
import re
from pathlib import Path

import msgspec
import pytest

from paceline import spec
from paceline.bench.table import loss_difference
from paceline.explain import explain
from paceline.explain.advice import EFFORT, MOST_ACTIONS
from paceline.explain.facts import gather
from paceline.explain.needs import SPREAD
from paceline.explain.reference import with_table
from paceline.record import RunFolder, open_folder
from tests.support.synthetic import MB, Machine, Times, names, synchronous_run

CLASSES = {"num_classes": 10.0}


class TestLosses:
    """A run that does not learn is not healthy, however fast it is."""

    def test_a_loss_that_grows_to_the_stars(self, tmp_path):
        run = synchronous_run(tmp_path / "run", losses=lambda s: 2.29 * 10 ** (0.6 * s))
        found = explain(run)
        assert not found.healthy
        assert names(found)[0] == "diverged"
        assert found.verdict.startswith("The loss rises from")

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_loss_that_is_no_number(self, tmp_path, bad):
        run = synchronous_run(tmp_path / "run", losses=lambda s: bad if s >= 10 else 2.3)
        found = explain(run)
        assert names(found)[0] == "not-finite"
        assert "not a number from step 10 on" in found.verdict
        summary = open_folder(run.path).summary()
        assert math.isnan(summary.loss.last)
        assert summary.loss.not_finite_from == 10

    def test_a_loss_that_was_no_number_on_the_way(self, tmp_path):
        run = synchronous_run(tmp_path / "run", losses=lambda s: math.nan if s == 10 else 2.3)
        assert names(explain(run))[0] == "not-finite"

    def test_no_number_trains_like_nothing(self, tmp_path):
        fine = synchronous_run(tmp_path / "fine")
        sick = synchronous_run(tmp_path / "sick", losses=lambda s: math.nan if s else 2.3)
        assert loss_difference(sick, fine) == math.inf
        assert loss_difference(fine, sick) == math.inf

    def test_guessing_after_many_steps(self, tmp_path):
        run = synchronous_run(tmp_path / "run", steps=60, losses=lambda s: 2.304, results=CLASSES)
        found = explain(run)
        assert names(found)[0] == "chance"
        assert "guessing" in found.verdict

    def test_few_steps_may_guess(self, tmp_path):
        run = synchronous_run(tmp_path / "run", steps=20, losses=lambda s: 2.304, results=CLASSES)
        assert explain(run).healthy

    def test_labels_that_mean_nothing_cannot_be_learnt(self, tmp_path):
        run = synchronous_run(tmp_path / "run", steps=60, losses=lambda s: 2.304)
        assert explain(run).healthy


class TestAsynchrony:
    """What stale gradients cost is said where the throughput is said."""

    def stale(self, path, **changes):
        counts = {"staleness": {"worker0": {"1": 60}, "worker1": {"1": 60}}}
        usual = {
            "architecture": "server:mode=async",
            "servers": 1,
            "steps": 60,
            "counters": {"server0": counts},
            "results": CLASSES,
            "fields": {"optimizer": {"learning_rate": 0.1}},
        }
        return synchronous_run(path, **{**usual, **changes})

    @pytest.mark.parametrize("mode", ["async", "bounded"])
    def test_stale_gradients_that_keep_it_guessing(self, tmp_path, mode):
        kind = f"server:mode={mode}"
        run = self.stale(tmp_path / "run", architecture=kind, losses=lambda s: 2.304)
        found = explain(run)
        assert names(found)[0] == "staleness"
        assert "1.0 updates old" in found.verdict
        aware, lower = found.actions[:2]
        assert aware.change == {"architecture": f"{kind},staleness_aware=true"}
        assert lower.change == {"optimizer": {"learning_rate": 0.05}}

    def test_a_rate_that_is_staleness_aware_is_not_offered_again(self, tmp_path):
        kind = "server:mode=async,staleness_aware=true"
        run = self.stale(tmp_path / "run", architecture=kind, losses=lambda s: 2.304)
        assert not any("staleness_aware" in action.text for action in explain(run).actions)

    def test_a_loss_worse_than_the_baselines_at_equal_samples(self, tmp_path):
        run = self.stale(tmp_path / "run", losses=lambda s: 2.3 / (1 + 0.01 * s))
        baseline = synchronous_run(
            tmp_path / "sync", architecture="server", servers=1, steps=60, results=CLASSES
        )
        found = explain(run, baseline)
        assert names(found)[0] == "staleness"
        own, other = found.learning.at_equal_samples
        assert own > 1.2 * other
        assert found.learning.at_equal_seconds is not None

    def test_staleness_that_costs_nothing_is_said_all_the_same(self, tmp_path):
        found = explain(self.stale(tmp_path / "run"))
        assert found.learning.staleness == pytest.approx(1.0)
        assert found.healthy
        assert "updates old" in found.verdict


class TestFailures:
    """A failed run's explanation starts with the failure."""

    def test_a_run_that_crashed_at_step_five(self, tmp_path):
        said = "worker1 exited 1: RuntimeError: boom"
        run = synchronous_run(
            tmp_path / "run",
            steps=5,
            batch=1,
            status="failed",
            event=said,
            times=Times(forward=0.0004, backward=0.0005, overhead=0.0005, input=0.0001),
        )
        found = explain(run)
        assert names(found)[0] == "failed"
        assert found.verdict.startswith(f"The run failed after 5 steps: {said}")
        assert "Next:" not in found.verdict, "what would make it faster is no answer"

    def test_a_run_that_failed_before_its_first_step(self, tmp_path):
        run = RunFolder.create(tmp_path / "run", spec.Experiment())
        summary = run.summary()
        summary.status = "failed"
        run.write_summary(summary)
        found = explain(run)
        assert not found.healthy
        assert found.verdict.startswith("The run failed before its first step")

    def test_a_run_whose_launcher_is_gone(self, tmp_path):
        run = synchronous_run(tmp_path / "run", status="running")
        launcher = {"host": platform.node(), "boot": "", "pid": 1, "start_ticks": 1}
        (run.path / "launcher.json").write_bytes(msgspec.json.encode(launcher))
        found = explain(run)
        assert names(found)[0] == "failed"
        assert found.verdict.startswith("The run was killed after 40 steps")

    def test_a_worker_that_was_lost_on_the_way(self, tmp_path):
        said = "worker1 was lost in step 12; the other worker goes on"
        found = explain(synchronous_run(tmp_path / "run", event=said))
        assert names(found)[0] == "lost"
        assert said[1:] in found.verdict


class TestCores:
    """Four workers on two cores, and cores that others use, are what limits."""

    def test_more_workers_than_cores(self, tmp_path):
        machine = Machine(cpu_fraction=0.5, cpu_wait_fraction=0.45, machine_cpu_fraction=2.0)
        found = explain(synchronous_run(tmp_path / "run", workers=4, cores=2, machine=machine))
        assert names(found)[0] == "cores"
        assert "4 threads share 2 cores" in found.verdict

    def test_cores_that_others_use(self, tmp_path):
        machine = Machine(cpu_fraction=0.2, cpu_wait_fraction=0.7, machine_cpu_fraction=2.0)
        found = explain(synchronous_run(tmp_path / "run", workers=2, cores=2, machine=machine))
        assert names(found)[0] == "cpu-taken"
        assert found.verdict.startswith("Other processes have the cores")

    def test_a_baseline_whose_cores_others_used_is_doubted(self, tmp_path):
        busy = Machine(cpu_fraction=0.2, cpu_wait_fraction=0.7, machine_cpu_fraction=2.0)
        usual = {"workers": 1, "architecture": "single", "cores": 2}
        run = synchronous_run(tmp_path / "run", cores=2)
        taken = synchronous_run(tmp_path / "taken", machine=busy, **usual)
        assert "measure it again" in explain(run, taken).verdict
        fine = synchronous_run(tmp_path / "fine", **usual)
        assert "measure it again" not in explain(run, fine).verdict

    def test_a_kernel_that_does_not_count_delays(self, tmp_path):
        machine = Machine(cpu_fraction=0.2, machine_cpu_fraction=2.0)
        found = explain(synchronous_run(tmp_path / "run", workers=2, cores=2, machine=machine))
        assert names(found)[0] == "cpu-taken"

    def test_full_cores_are_looked_at_in_the_tunnel_too(self, tmp_path):
        machine = Machine(cpu_fraction=0.5, cpu_wait_fraction=0.45, machine_cpu_fraction=2.0)
        run = synchronous_run(tmp_path / "run", workers=4, cores=2, machine=machine, link="10gbit")
        assert names(explain(run))[0] == "cores"

    def test_an_emulated_device_needs_no_core(self, tmp_path):
        machine = Machine(cpu_fraction=0.2, machine_cpu_fraction=2.0)
        run = synchronous_run(
            tmp_path / "run",
            workers=4,
            cores=2,
            machine=machine,
            link="10gbit",
            fields={"device": "k80"},
        )
        assert explain(run).healthy

    def test_memory_that_is_full(self, tmp_path):
        machine = Machine(available_bytes=500 * MB)
        found = explain(synchronous_run(tmp_path / "run", machine=machine))
        assert names(found)[0] == "memory"

    def test_low_efficiency_is_not_healthy(self, tmp_path):
        """Four workers whose compute takes three times the baseline's scale to 30 %."""
        slow = Times(forward=0.030, backward=0.054)
        run = synchronous_run(tmp_path / "run", workers=4, times=slow)
        single = synchronous_run(tmp_path / "single", workers=1, architecture="single")
        assert explain(run).healthy  # nothing to see without a baseline
        found = explain(run, single)
        assert found.efficiency < 0.4
        assert not found.healthy
        assert names(found)[0] == "compute"


class TestPauses:
    """Everything between start and end is somewhere, and a pause is nobody's step."""

    def every_second(self, path, **changes):
        def pause(worker, step):
            return 0.05 if worker == "worker0" and step % 2 else 0.0

        return synchronous_run(path, pause=pause, **changes)

    def test_checkpoints_every_second_step(self, tmp_path):
        run = self.every_second(tmp_path / "run")
        found = explain(run)
        assert names(found)[0] == "pauses"
        assert found.verdict.startswith("Checkpoints take")
        step, pause = 0.033, 0.025
        summary = run.summary()
        assert summary.samples_per_second == pytest.approx(64 / step, rel=0.05)
        expected = pytest.approx(64 / (step + pause), rel=0.05)
        assert summary.samples_per_second_with_pauses == expected

    def test_who_waits_for_a_checkpoint_waits_for_no_slow_worker(self, tmp_path):
        found = explain(self.every_second(tmp_path / "run"))
        assert found.late is None
        assert not {"slow-worker", "jitter"} & set(names(found))

    def test_pauses_that_nobody_named(self, tmp_path):
        """A script that logs for long in every tenth step."""
        run = synchronous_run(
            tmp_path / "run", steps=60, outside=lambda step: 0.3 if step % 10 == 9 else 0.0
        )
        found = explain(run)
        assert names(found)[0] == "pauses"
        assert "the script's own pauses" in found.verdict.lower()
        assert "small-batch" not in names(found)

    def test_a_pause_in_every_step_is_the_scripts(self, tmp_path):
        found = explain(synchronous_run(tmp_path / "run", times=Times(overhead=0.050)))
        assert names(found) == ["overhead"]

    def test_the_parts_of_the_wall_sum_to_the_whole(self, tmp_path):
        run = self.every_second(tmp_path / "run", first_steps_seconds=1.0)
        wall = run.summary().wall_seconds
        steps = run.steps("worker0")
        assert sum(wall.values()) == pytest.approx(steps[-1].end_seconds - steps[0].start_seconds)
        assert wall["checkpoint"] == pytest.approx(20 * 0.05)

    def test_a_first_step_that_is_most_of_the_run(self, tmp_path):
        run = synchronous_run(tmp_path / "run", first_steps_seconds=6.0)
        found = explain(run)
        assert names(found)[0] == "first-steps"
        assert re.match(r"The first 5 steps take [56]\.\d+ s longer", found.verdict)
        assert found.causes[0].fraction == pytest.approx(0.8, abs=0.1)

    def test_slowness_that_comes_and_goes(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", steps=69, slow_steps=lambda s: 5.0 if s % 8 == 7 else 1.0
        )
        found = explain(run)
        assert names(found)[0] == "intermittent"
        assert "one step in 8" in found.verdict.lower()
        assert "worker0" in found.verdict

    def test_constant_slowness_is_not_called_intermittent(self, tmp_path):
        run = synchronous_run(tmp_path / "run", slow={"worker0": Times(forward=0.05)})
        assert names(explain(run)) == ["slow-worker"]


class TestCauses:
    """The resource that binds, per member and link."""

    def test_no_worker_is_blamed_for_an_exchange_all_take_part_in(self, tmp_path):
        """A long exchange on equal cables, and a worker a little later than the rest."""
        run = synchronous_run(
            tmp_path / "run",
            workers=3,
            link="100mbit",
            exchange_bytes=8 * MB,
            exchange_seconds=0.66,
            slow={"worker2": Times(forward=0.027)},
        )
        found = explain(run)
        assert names(found) == ["slow-link"]
        assert "waiting for worker2" not in found.verdict.lower()

    def test_delay_is_not_bandwidth(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            link="1gbit,10ms",
            exchange_bytes=1 * MB,
            exchange_seconds=0.090,
        )
        found = explain(run)
        assert names(found)[0] == "latency"
        assert "bandwidth" in found.verdict

    def test_a_server_busier_than_any_link(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            workers=4,
            servers=2,
            architecture="server",
            link="1gbit",
            exchange_bytes=3 * MB,
            exchange_seconds=0.020,
            server_cpu_fraction=0.92,
        )
        found = explain(run)
        assert names(found)[0] == "server"
        assert found.actions[0].change["servers"] > 2

    def test_one_slow_cable_is_called_the_cable(self, tmp_path):
        hosts = [{}, {}, {"link": "250mbit"}, {}]
        run = synchronous_run(
            tmp_path / "run",
            workers=4,
            link="1gbit",
            exchange_bytes=5 * MB,
            exchange_seconds=0.17,
            fields={"hosts": hosts},
        )
        found = explain(run)
        assert names(found)[0] == "slow-cable"
        assert "the cable of worker2" in found.verdict.lower()
        action = found.actions[0]
        assert "cable of worker2" in action.text
        assert action.gain.low > 0
        assert [host.get("link") for host in action.change["hosts"]] == [None] * 4

    def test_compression_that_costs_more_than_it_saves(self, tmp_path):
        counted = {
            "compression_seconds": 40 * 0.02,
            "compression_raw_bytes": 40_000_000,
            "compression_encoded_bytes": 400_000,
        }
        run = synchronous_run(
            tmp_path / "run",
            workers=2,
            servers=1,
            architecture="server:compression=topk",
            link="10gbit",
            exchange_bytes=0.1 * MB,
            exchange_seconds=0.022,
            server_cpu_fraction=0.05,
            counters={"worker0": counted, "worker1": counted},
        )
        found = explain(run)
        assert names(found)[0] == "compression"
        assert found.actions[0].change == {"architecture": "server"}
        assert found.actions[0].gain.low > 0

    def test_as_many_workers_have_no_share_of_ideal(self, tmp_path):
        """One server against two: the second is faster, not 214 % of an ideal."""
        usual = {"workers": 4, "architecture": "server", "link": "1gbit", "exchange_bytes": MB}
        two = synchronous_run(tmp_path / "two", servers=2, exchange_seconds=0.004, **usual)
        one = synchronous_run(tmp_path / "one", servers=1, exchange_seconds=0.033, **usual)
        found = explain(two, one)
        assert "of ideal" not in found.verdict
        assert found.verdict.startswith("Servers: 2 where the baseline has 1.")


class TestScripts:
    """A script names its model, its data and its batch itself; explaining it asks for none."""

    def test_a_scripts_run_beside_its_run_on_one_worker(self, tmp_path):
        one = synchronous_run(tmp_path / "one", workers=1, architecture="single", script="train.py")
        two = synchronous_run(tmp_path / "two", script="train.py", exchange_seconds=0.040)
        found = explain(two, one)
        assert found.speedup == pytest.approx(2 * 0.031 / 0.071, rel=0.1)
        assert (found.run, found.baseline) == ("two", "one")
        assert found.differs == (
            "architecture: ring, in the baseline single",
            "workers: 2, in the baseline 1",
        )


class TestActions:
    """Gains are against the next limit; what does not help is not offered; the best comes first."""

    def test_a_straggler_gains_only_up_to_the_link(self, tmp_path):
        """Without the slow worker the link binds: 25 MB at 2 Gbit take 100 ms."""
        run = synchronous_run(
            tmp_path / "run",
            link="2gbit",
            exchange_bytes=25 * MB,
            exchange_seconds=0.010,
            times=Times(forward=0.030, backward=0.060),
            slow={"worker1": Times(forward=0.060, backward=0.120)},
        )
        found = explain(run)
        assert names(found)[0] == "slow-worker"
        best = next(a for a in found.actions if "pace" in a.text)
        assert best.gain.high < 0.195 / 0.100 * math.exp(SPREAD) - 1

    def test_half_the_gradient_bytes_are_not_half_the_bytes(self, tmp_path):
        """Weights come back whole: with servers of their own, the busier direction stays."""
        run = synchronous_run(
            tmp_path / "run",
            workers=2,
            servers=2,
            architecture="server",
            link="1gbit",
            exchange_bytes=20 * MB,
            exchange_seconds=0.15,
        )
        assert not any("bf16" in action.text for action in explain(run).actions)

    def test_shares_gain_only_up_to_the_link(self, tmp_path):
        """Dealt by speed all compute for 128 ms where the slow one did for 182; the link takes 100.

        Without the link +33 %; with it no more than what is left of the step.
        """
        run = synchronous_run(
            tmp_path / "run",
            link="2gbit",
            exchange_bytes=25 * MB,
            exchange_seconds=0.080,
            times=Times(forward=0.030, backward=0.060),
            slow={"worker1": Times(forward=0.060, backward=0.120)},
        )
        action = next(a for a in explain(run).actions if "shares" in a.text)
        step, dealt = 0.262, 0.120
        assert action.gain.low > 0
        assert action.gain.high < step / (dealt + 0.080) * math.exp(SPREAD) - 1

    def test_compressed_gradients_save_a_quarter_where_workers_serve(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            workers=3,
            architecture="server:placement=colocated",
            link="200mbit",
            exchange_bytes=9 * MB,
            exchange_seconds=0.38,
        )
        action = next(a for a in explain(run).actions if "bf16" in a.text)
        assert action.gain.high < 1 / 0.75 * math.exp(SPREAD) - 1

    @pytest.mark.parametrize(("on_loss", "shared"), [("stop", True), ("continue", False)])
    def test_what_a_loss_must_not_take_moves_by_sockets(self, tmp_path, on_loss, shared):
        def run(architecture):
            folder = synchronous_run(
                tmp_path / architecture.partition(":")[0],
                architecture=architecture,
                times=Times(forward=0.1, backward=0.2),
                exchange_seconds=0.1,
                fields={"on_loss": on_loss},
            )
            for member in folder.members():
                member.host = "one"
                folder.write_member(member)
            return folder

        assert gather(run("server:placement=colocated")).shares_memory == shared
        texts = [action.text for action in explain(run("ring")).actions]
        assert any("through shared memory" in text for text in texts) == shared

    def test_actions_are_sorted_by_gain_per_effort(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", link="100mbit", exchange_bytes=2 * MB, exchange_seconds=0.17
        )
        promised = [action for action in explain(run).actions if action.gain is not None]
        assert 1 < len(promised) <= MOST_ACTIONS
        ranks = [math.log1p(a.gain.middle) / EFFORT[a.effort] for a in promised]
        assert ranks == sorted(ranks, reverse=True)

    def test_a_batch_that_is_advised_is_one_that_nobody_has(self, tmp_path):
        """Uneven shares: the typical worker's 18 samples are not the experiment's 32."""
        run = synchronous_run(
            tmp_path / "run",
            link="100mbit",
            batch=18,
            exchange_bytes=2 * MB,
            exchange_seconds=0.17,
            fields={"batch": 32},
        )
        advised = [a.change["batch"] for a in explain(run).actions if "batch" in a.change]
        assert advised == [64]


def test_the_documentation_holds_the_table_of_causes():
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    assert with_table(page) == page, "python -m paceline.explain.reference docs/explain.md"
