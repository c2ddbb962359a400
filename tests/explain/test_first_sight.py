"""Situations that were judged at first sight and named wrongly, each as a record that shows it."""

import math
import random

import msgspec
import pytest

from paceline.explain import explain
from paceline.record import RecordedEvent, RunFolder
from paceline.record.entries import NOT_FINITE
from tests.support.synthetic import MB, Machine, Times, names, rewritten, synchronous_run

RACKS = [{"count": 2, "rack": "a"}, {"count": 2, "rack": "b"}]
WHOLE = {"elements": 1000, "frozen": 0, "without_gradient": 0, "for_example": ""}
LONG = Times(forward=0.1, backward=0.2)


def shaky(level, size=0.001, seed=3):
    generator = random.Random(seed)
    return lambda step: level(step) * (1 + size * generator.gauss(0, 1))


def of_a_script(path, losses, *, steps=80, reach=None, objective=None, **changes):
    counters = {}
    if reach is not None:
        counters["reach"] = {**WHOLE, **reach}
    if objective is not None:
        counters["objective"] = objective
    return synchronous_run(
        path,
        steps=steps,
        script="train.py",
        losses=losses,
        counters={"worker0": counters},
        **changes,
    )


def with_series(run: RunFolder, member: str, change) -> RunFolder:
    """The same run, with every sample of a member changed."""
    file = run.path / "members" / f"{member}.series.jsonl"
    entries = [change(msgspec.json.decode(line)) for line in file.read_bytes().splitlines()]
    file.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    return RunFolder(run.path)


class TestNetwork:
    @pytest.mark.parametrize("architecture", ["ring", "server:placement=colocated"])
    def test_racks_that_a_thin_uplink_joins(self, tmp_path, architecture):
        counters = {f"worker{n}": {"served_bytes": MB} for n in range(4)}
        run = synchronous_run(
            tmp_path / "run",
            workers=4,
            link="1gbit",
            architecture=architecture,
            exchange_bytes=4 * MB,
            exchange_seconds=0.35,
            counters=counters if architecture != "ring" else None,
            fields={"hosts": RACKS, "uplink": "100mbit"},
        )
        found = explain(run)
        assert names(found)[0] == "uplink", found.verdict
        assert "100 Mbit/s uplink" in found.verdict
        assert any("uplink" in action.text for action in found.actions)
        assert found.resources[0].kind == "uplink"

    def test_racks_with_a_wide_uplink_are_healthy(self, tmp_path):
        fields = {"hosts": RACKS, "uplink": "10gbit"}
        run = synchronous_run(tmp_path / "run", workers=4, link="10gbit", fields=fields)
        assert explain(run).healthy

    def test_two_of_four_cables(self, tmp_path):
        hosts = [{"count": 2}, {"count": 2, "link": "200mbit"}]
        run = synchronous_run(
            tmp_path / "run",
            workers=4,
            link="1gbit",
            exchange_bytes=5 * MB,
            exchange_seconds=0.21,
            fields={"hosts": hosts},
        )
        found = explain(run)
        assert names(found)[0] == "slow-cable", found.verdict
        assert "cables of worker2 and worker3" in found.verdict
        cables = next(a for a in found.actions if "worker2 and worker3" in a.text)
        assert cables.gain.low > 0.5
        assert [host.get("link", "") for host in cables.change["hosts"]] == [""] * 4

    def test_what_no_resource_explains_is_no_fixed_cost(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run", link="10gbit", exchange_bytes=MB, exchange_seconds=0.2
        )
        found = explain(run)
        assert names(found)[0] == "unexplained", found.verdict
        assert "batch" not in found.verdict
        assert "measure" in found.actions[0].text

    def test_a_link_that_idles_is_said_to(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            link="100mbit",
            times=LONG,
            exchange_bytes=1.5 * MB,
            exchange_seconds=0.12,
        )
        found = explain(run)
        assert names(found)[0] == "slow-link", found.verdict
        assert "it idles until" in found.verdict

    def test_gradients_that_travel_in_every_part_of_a_batch(self, tmp_path):
        run = of_a_script(
            tmp_path / "run",
            lambda s: 2.3 / (1 + 0.05 * s),
            reach={"trained_bytes": MB},
            link="1gbit",
            exchange_bytes=8 * MB,
            exchange_seconds=0.06,
        )
        found = explain(run)
        assert names(found)[0] == "repeated", found.verdict
        assert "8 times in each step" in found.verdict
        assert "no_sync" in found.actions[0].text

    def test_two_small_remainders_are_told_with_their_sum(self, tmp_path):
        """79 % computing: 11 % a link, 10 % something that nothing explains."""
        run = synchronous_run(
            tmp_path / "run",
            link="200mbit",
            times=Times(forward=0.03, backward=0.06, overhead=0.0, input=0.0),
            exchange_bytes=0.32 * MB,
            exchange_seconds=0.024,
        )
        found = explain(run)
        assert "21% together" in found.verdict, found.verdict


class TestServers:
    def test_one_server_that_holds_most_bytes(self, tmp_path):
        held = {f"server{n}": {"served_bytes": MB * (98 if n == 0 else 2 / 3)} for n in range(4)}
        run = synchronous_run(
            tmp_path / "run",
            workers=4,
            servers=4,
            architecture="server:chunk=64MiB",
            link="1gbit",
            exchange_bytes=5 * MB,
            exchange_seconds=0.15,
            counters=held,
        )
        scale = {f"server{n}": 4 * (0.98 if n == 0 else 0.02 / 3) for n in range(4)}
        for name, factor in scale.items():

            def scaled(sample, factor=factor):
                both = ("bytes_sent", "bytes_received")
                return {**sample, **{what: int(sample[what] * factor) for what in both}}

            run = with_series(run, name, scaled)
        found = explain(run)
        assert names(found)[0] == "uneven-servers", found.verdict
        assert "98% of the bytes" in found.verdict
        assert found.actions[0].change == {"architecture": "server"}
        assert found.actions[0].gain.high > 1.5

    def test_a_server_whose_core_others_use(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            workers=2,
            servers=1,
            architecture="server",
            link="1gbit",
            exchange_bytes=0.2 * MB,
            exchange_seconds=0.03,
            fields={"device": "k80"},
        )
        run = with_series(run, "server0", lambda s: {**s, "cpu_wait_fraction": 0.5})
        found = explain(run)
        assert names(found)[0] == "server-core", found.verdict
        assert "server0 lacks a core" in found.verdict.lower()
        assert not any("servers in place" in action.text for action in found.actions)


class TestInput:
    def test_readers_that_share_a_lock(self, tmp_path):
        loader = {f"worker{n}": {"loader": {"processes": 2}} for n in range(2)}
        run = synchronous_run(
            tmp_path / "run",
            times=Times(input=0.05),
            counters=loader,
            script="train.py",
            machine=Machine(children_cpu_fraction=0.1),
        )
        found = explain(run)
        assert names(found)[0] == "reader-lock", found.verdict
        assert "wait for each other" in found.verdict
        assert not any("num_workers" in action.text for action in found.actions)

    def test_readers_that_work_are_not_blamed_for_a_lock(self, tmp_path):
        loader = {f"worker{n}": {"loader": {"processes": 2}} for n in range(2)}
        run = synchronous_run(
            tmp_path / "run",
            times=Times(input=0.05),
            counters=loader,
            script="train.py",
            machine=Machine(children_cpu_fraction=1.9),
        )
        assert names(explain(run))[0] == "input"


class TestMachine:
    def test_memory_that_another_process_holds(self, tmp_path):
        machine = Machine(available_bytes=500 * MB)
        found = explain(synchronous_run(tmp_path / "run", link="10gbit", machine=machine))
        assert names(found)[0] == "memory"
        assert "processes outside this job hold" in found.verdict
        assert "smaller batch" not in found.actions[0].text

    def test_no_time_is_lost_where_cores_are_taken_but_what_is_charged(self, tmp_path):
        machine = Machine(cpu_fraction=0.2, cpu_wait_fraction=0.7, machine_cpu_fraction=2.0)
        found = explain(synchronous_run(tmp_path / "run", cores=2, machine=machine))
        compute = next(part for part in found.parts if part.name == "compute")
        assert names(found)[0] == "cpu-taken"
        assert compute.lost_seconds > 0.5 * compute.seconds
        assert all(part.lost_seconds >= 0 for part in found.parts)

    def test_a_baseline_that_was_slowed_gives_no_efficiency_above_ideal(self, tmp_path):
        run = synchronous_run(tmp_path / "run")
        slow = {"workers": 1, "architecture": "single"}
        baseline = synchronous_run(tmp_path / "one", times=Times(forward=0.2), **slow)
        found = explain(run, baseline)
        assert "% of ideal" not in found.verdict
        assert "slowed by something else" in found.verdict
        assert all(part.lost_seconds >= 0 for part in found.parts)

    def test_all_percentages_have_one_denominator(self, tmp_path):
        run = synchronous_run(
            tmp_path / "run",
            times=Times(overhead=0.03),
            pause=lambda worker, step: 0.08 if step % 2 else 0.0,
        )
        found = explain(run)
        assert sum(part.fraction for part in found.parts) == pytest.approx(1)
        assert {"pauses", "overhead"} <= set(names(found))
        assert sum(cause.fraction for cause in found.causes) < 1


def test_workers_that_are_late_in_turn(tmp_path):
    run = synchronous_run(tmp_path / "run", workers=3, steps=30, jitter=0)

    def turning(name, entry):
        step = entry["step"]
        own = 0.03 + (0.06 if step % 3 == int(name[-1]) else 0.0)
        start = 1000 + 0.1 * step
        return {
            **entry,
            "start_seconds": start,
            "ready_seconds": start + own,
            "end_seconds": start + 0.095,
            "breakdown_seconds": {
                "forward": own / 3,
                "backward": 2 * own / 3,
                "exchange_exposed": 0.094 - own,
                "update": 0.001,
            },
        }

    found = explain(rewritten(run, turning))
    assert names(found)[0] == "rotating", found.verdict
    assert "late in turn" in found.verdict
    assert found.actions[0].gain.low < 0.095 / 0.035 - 1 < found.actions[0].gain.high


class TestLearning:
    @pytest.mark.parametrize("fall", [0.0002, 0.003])
    def test_labels_that_are_shuffled(self, tmp_path, fall):
        losses = shaky(lambda s: 2.304 * (1 - fall * s / 120), 0.0003)
        seen = {"guess": 2.3, "batches": 32, "negated": False}
        found = explain(of_a_script(tmp_path / "run", losses, steps=120, objective=seen))
        assert names(found)[0] == "chance", found.verdict

    def test_labels_that_are_shuffled_and_were_not_seen(self, tmp_path):
        losses = shaky(lambda s: 2.304 * (1 - 0.003 * s / 120), 0.0003)
        found = explain(of_a_script(tmp_path / "run", losses, steps=120))
        assert names(found)[0] == "flat", found.verdict
        assert "guessing among 10 classes" in found.verdict

    @pytest.mark.parametrize(
        "architecture", ["server:mode=async", "average:every=100"], ids=["async", "average"]
    )
    def test_losses_that_rise_before_they_are_no_numbers(self, tmp_path, architecture):
        def losses(step):
            return math.nan if step >= 20 else 2.3 * 1.4 ** max(0, step - 3)

        servers = 1 if "server" in architecture else 0
        run = synchronous_run(
            tmp_path / "run", workers=4, servers=servers, architecture=architecture, losses=losses
        )
        text = "the loss of worker3 is not finite at step 19"
        event = RecordedEvent(
            time_seconds=0.0, member="worker3", kind=NOT_FINITE, text=text, step=19
        )
        run.add_event(event)
        found = explain(run)
        assert names(found)[0] == "diverged", found.verdict
        assert "worker3" not in found.verdict
        assert "rate" in found.actions[0].text

    def test_a_loss_that_falls_far_before_it_is_no_number(self, tmp_path):
        run = of_a_script(
            tmp_path / "run", lambda s: math.nan if s > 40 else -29 * 3.0**s, steps=50
        )
        found = explain(run)
        assert names(found)[0] == "diverged", found.verdict
        assert "sign" in found.actions[0].text

    def test_a_sign_that_is_wrong_and_slow(self, tmp_path):
        losses = shaky(lambda s: -2.30 - 0.0002 * s, 0.0003)
        seen = {"guess": 2.3, "batches": 32, "negated": True}
        found = explain(of_a_script(tmp_path / "run", losses, objective=seen))
        assert names(found)[0] == "diverged", found.verdict
        assert "its sign is wrong" in found.verdict

    @pytest.mark.parametrize(
        ("reach", "said", "advised"),
        [
            ({"zero_gradient": 980}, "gradient of 98% of the weights is exactly zero", "ReLU"),
            ({"without_optimizer": 980}, "98% of the weights are in no optimizer", "parameters()"),
        ],
        ids=["dead", "no-optimizer"],
    )
    def test_weights_that_nothing_trains(self, tmp_path, reach, said, advised):
        losses = shaky(lambda s: 2.303, 0.0003)
        examples = dict.fromkeys(reach, "body.weight")
        told = {**reach, "examples": examples, "moved": 0.01}
        found = explain(of_a_script(tmp_path / "run", losses, reach=told))
        assert names(found)[0] == "flat", found.verdict
        assert said in found.verdict
        assert "body.weight" in found.verdict
        assert advised in found.actions[0].text

    def test_samples_sorted_by_class(self, tmp_path):
        seen = {"guess": 2.3, "batches": 32, "labels_per_batch": 1.1, "labels_if_shuffled": 9.6}
        losses = shaky(lambda s: 2.3 / (1 + 0.05 * s))
        found = explain(of_a_script(tmp_path / "run", losses, objective=seen))
        assert names(found)[0] == "sorted-samples", found.verdict

    def test_samples_that_are_shuffled(self, tmp_path):
        seen = {"guess": 2.3, "batches": 32, "labels_per_batch": 9.5, "labels_if_shuffled": 9.6}
        losses = shaky(lambda s: 2.3 / (1 + 0.05 * s))
        assert explain(of_a_script(tmp_path / "run", losses, objective=seen)).healthy
