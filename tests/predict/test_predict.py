"""What predictions promise: closed forms, the same answer for a seed, machines that decide."""

import pytest
from msgspec.structs import replace

from paceline import spec
from paceline.errors import SpecError
from paceline.predict import virtual
from paceline.predict.answer import predict, simulate
from paceline.predict.stacks import Constants, expected, find_stack, stacks
from paceline.protocol.actions import Send
from paceline.protocol.messages import Answer
from paceline.protocol.placement import exchange_seconds
from paceline.protocol.seat import SeatMachine
from paceline.spec.profile import DeviceProfile, Layer, save_profile

LAYERS, LAYER_BYTES = 32, 4 << 20
RATE = 125e6


@pytest.fixture
def fast_device(tmp_path):
    """A device that takes next to no time, so that the exchange is all there is."""

    def make(seconds: float = 1e-6) -> str:
        layers = tuple(
            Layer(
                name=f"layer{i}",
                forward_seconds=seconds / LAYERS / 3,
                backward_seconds=seconds / LAYERS * 2 / 3,
                parameter_bytes=LAYER_BYTES,
            )
            for i in range(LAYERS)
        )
        profile = DeviceProfile(
            device="toy", model="toy:model", batch=32, input_shape=(1,), kind="estimated",
            source="a test", layers=layers,
        )  # fmt: skip
        path = tmp_path / f"toy-{seconds:g}.json"
        save_profile(profile, path)
        return str(path)

    return make


def experiment(device: str, architecture: str, workers: int, servers: int = 0, **cluster):
    return spec.from_tables(
        {
            "engine": "predict",
            "workload": {"model": "toy:model", "data": "synthetic", "batch": 32},
            "architecture": architecture,
            "cluster": {
                "workers": workers, "servers": servers, "device": device, "link": "1gbit",
                **cluster,
            },
        },
        "test",
    )  # fmt: skip


def ideal() -> Constants:
    """Nothing costs anything but links."""
    free = dict.fromkeys(Constants.__struct_fields__, 0.0)
    whole = {"tcp_fraction": 1.0, "rdma_fraction": 1.0, "bus_fraction": 1.0}
    return Constants(**{**free, **whole, "process_rate": 1e15, "sum_rate": 1e15})


@pytest.mark.parametrize(
    ("architecture", "placement", "workers", "servers"),
    [
        ("ring", "colocated", 4, 0),
        ("ring", "colocated", 64, 0),
        ("server", "dedicated", 4, 1),
        ("server", "dedicated", 4, 2),
        ("server:placement=colocated,chunk=256KiB", "colocated", 4, 0),
        ("server", "dedicated", 64, 8),
        ("server", "dedicated", 256, 256),
    ],
)
def test_the_closed_forms_hold_to_one_percent(
    fast_device, architecture, placement, workers, servers
):
    asked = experiment(fast_device(), architecture, workers, servers)
    found = simulate(asked, find_stack("paceline"), ideal())
    closed = exchange_seconds(placement, workers, servers, LAYERS * LAYER_BYTES, RATE)
    assert found.step_seconds == pytest.approx(closed, rel=0.01)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_round_that_averages_the_optimizers_state_takes_as_much_longer(fast_device, name):
    """Adam keeps two numbers for each weight, plain SGD none: of that only the count is summed."""
    asked = experiment(fast_device(), "average:every=4", 3)
    workload = replace(asked.workload, optimizer=spec.Optimizer(name=name))
    asked = replace(asked, workload=workload)
    without = simulate(asked).phases["exchange_exposed"]
    asked = replace(asked, architecture=spec.Average(every=4, state=True))
    factor = simulate(asked).phases["exchange_exposed"] / without
    assert factor == pytest.approx(3.0 if name == "adam" else 1.0, rel=0.01)
    assert factor > 1.0


@pytest.mark.parametrize(
    ("architecture", "workers", "servers", "name", "extra"),
    [
        ("server", 4, 1, "adam", 0),  # the last server is nobody's spare
        ("server", 4, 2, "sgd", 0),
        ("server", 4, 2, "adam", 2),
        ("server", 64, 8, "adam", 2),
    ],
)
def test_who_goes_on_without_the_lost_sums_a_step_before_it_answers(
    fast_device, architecture, workers, servers, name, extra
):
    """All gradients come in, and then weights go out, with the optimizer's state for one worker."""
    asked = experiment(fast_device(), architecture, workers, servers, on_loss="continue")
    asked = replace(asked, workload=replace(asked.workload, optimizer=spec.Optimizer(name=name)))
    found = simulate(asked, find_stack("paceline"), ideal())
    one_way = LAYERS * LAYER_BYTES / (servers * RATE)
    assert found.step_seconds == pytest.approx((2 * workers + extra) * one_way, rel=0.02)


def test_compute_hides_an_exchange_that_is_shorter(fast_device):
    slow = experiment(fast_device(20.0), "server:placement=colocated", 4)
    found = simulate(slow, find_stack("paceline"), ideal())
    assert found.step_seconds == pytest.approx(20.0, rel=0.01)


def test_ring_never_hides_forward(fast_device):
    asked = experiment(fast_device(6.0), "ring", 4)
    found = simulate(asked, find_stack("paceline"), ideal())
    closed = exchange_seconds("colocated", 4, 0, LAYERS * LAYER_BYTES, RATE)
    assert closed < 4.0
    first_bucket = LAYER_BYTES * 7
    last = exchange_seconds("colocated", 4, 0, first_bucket, RATE)
    assert 6.0 < found.step_seconds <= 6.0 + last


def _is_answer(action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, Answer)


def test_a_changed_protocol_changes_its_prediction(fast_device, monkeypatch):
    """A server that waits for the whole step before it answers: nothing in predict/ knows of it."""

    class WaitsForTheWholeStep(SeatMachine):
        def __init__(self, plan, seat, **options):
            super().__init__(plan, seat, **options)
            self._held, self._owed = [], len(self._slots) * len(self.roster.present)

        def done(self, work, squared_norms=()):
            actions = super().done(work, squared_norms)
            self._held += [a for a in actions if _is_answer(a)]
            others = [a for a in actions if not _is_answer(a)]
            if len(self._held) < self._owed:
                return others
            answers, self._held = self._held, []
            return [*others, *answers]

    asked = experiment(fast_device(0.5), "server", 4, 4)
    before = simulate(asked).step_seconds
    monkeypatch.setattr(virtual, "SeatMachine", WaitsForTheWholeStep)
    after = simulate(asked).step_seconds
    assert after > 1.3 * before


def test_jitter_is_the_same_for_a_seed_and_another_for_another(fast_device):
    device = fast_device(1.0)
    hosts = [{"count": 3, "jitter_fraction": 0.2}, {"workers": 0, "servers": 1}]

    def seconds(seed: int) -> float:
        asked = experiment(device, "server", 3, 1, hosts=hosts, link="100gbit")
        return simulate(spec.replace(asked, seed=seed)).step_seconds

    assert seconds(1) == seconds(1)
    assert seconds(1) != seconds(2)


@pytest.mark.parametrize(
    ("architecture", "workers", "servers"),
    [
        ("ring", 1024, 0),
        ("server:placement=colocated", 1024, 0),
        ("server", 1024, 64),
        ("ring", 100_000, 0),
        ("server:placement=colocated", 100_000, 0),
    ],
)
def test_many_workers_cost_no_more_events_than_few(fast_device, architecture, workers, servers):
    found = simulate(experiment(fast_device(0.1), architecture, workers, servers))
    assert found.events < 20_000


def test_collapsed_workers_agree_with_every_one_simulated(fast_device, monkeypatch):
    asked = experiment(fast_device(0.5), "server", 12, 4)
    collapsed = simulate(asked).step_seconds
    monkeypatch.setattr("paceline.predict.cells.EXACT_MEMBERS", 100)
    assert simulate(asked).step_seconds == pytest.approx(collapsed, rel=0.05)


def test_a_straggler_holds_up_sync_and_not_async(fast_device):
    device = fast_device(1.0)
    hosts = [{"count": 3}, {"slowdown": 3.0}, {"workers": 0, "servers": 1}]
    cluster = {"hosts": hosts, "link": "100gbit"}
    sync = simulate(experiment(device, "server", 4, 1, **cluster)).samples_per_second
    free = simulate(experiment(device, "server:mode=async", 4, 1, **cluster)).samples_per_second
    assert sync == pytest.approx(4 * 32 / 3.0, rel=0.05)
    assert free == pytest.approx(3 * 32 / 1.0 + 32 / 3.0, rel=0.05)


def test_bounded_goes_at_the_pace_of_a_straggler_and_quorum_does_not(fast_device):
    device = fast_device(0.5)
    hosts = [{"count": 3}, {"slowdown": 4.0}, {"workers": 0, "servers": 1}]
    # Nothing else costs as much as the straggler's two seconds.
    kind = {"link": "100gbit", "hosts": hosts}
    rates = {
        mode: simulate(experiment(device, f"server:mode={mode}", 4, 1, **kind)).samples_per_second
        for mode in ("sync", "bounded", "quorum")
    }
    assert rates["bounded"] == pytest.approx(4 * 32 / 2.0, rel=0.05)
    assert rates["bounded"] == pytest.approx(rates["sync"], rel=0.05)
    assert rates["quorum"] > 2 * rates["sync"]


def test_compression_pays_on_a_slow_link_and_costs_on_a_fast_one(fast_device):
    device = fast_device(0.05)

    def step(compression: str, link: str) -> float:
        asked = f"server:placement=colocated,compression={compression}"
        return simulate(experiment(device, asked, 2, link=link)).step_seconds

    assert step("topk", "100mbit") < 0.8 * step("none", "100mbit")
    assert step("topk", "100gbit") > 2 * step("none", "100gbit")  # 64 MiB at 0.5 GB/s
    assert step("int8", "100gbit") > step("fp16", "100gbit") > step("none", "100gbit")


def test_an_interval_holds_its_prediction_and_widens_with_what_is_not_known(fast_device):
    asked = experiment(fast_device(0.2), "ring", 8)
    found = predict(asked)
    assert found.low < found.samples_per_second < found.high
    sure = predict(experiment(fast_device(50.0), "ring", 8))
    assert sure.high / sure.low < found.high / found.low


def test_every_stack_has_ordered_ranges():
    for stack in stacks().values():
        constants = expected(stack)
        assert all(getattr(constants, name) >= 0 for name in Constants.__struct_fields__)


def test_devices_of_a_host_share_its_cable(fast_device):
    device = fast_device()
    apart = experiment(device, "server", 8, 1)
    hosts = [{"count": 2, "workers": 4}, {"workers": 0, "servers": 1}]
    together = experiment(device, "server", 8, 1, hosts=hosts)
    stack = find_stack("paceline")
    assert simulate(together, stack, ideal()).step_seconds == pytest.approx(
        simulate(apart, stack, ideal()).step_seconds, rel=0.02
    )
    hosts[1] = {"count": 8, "workers": 0, "servers": 1}
    many = experiment(device, "server", 8, 8, hosts=hosts)
    closed = 4 * LAYERS * LAYER_BYTES / RATE
    assert simulate(many, stack, ideal()).step_seconds == pytest.approx(closed, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stack": "horovood"}, 'did you mean "horovod"'),
        ({"link": "infiniband-eddr"}, 'did you mean "infiniband-edr"'),
        ({"one_device": -1.0}, "one_device = -1 is negative"),
        ({"model_size": "big"}, 'size "big" is not a size'),
        ({"architecture": spec.Replicated(), "workers": 1}, "replicated cannot be predicted yet"),
        ({"model": "alexnett", "one_device": 5.0}, 'did you mean "alexnet"'),
        ({"hosts": ({"workers": 3},)}, "the hosts hold 3 workers, and the cluster has 4"),
    ],
)
def test_bad_input_is_a_sentence_with_its_fix(changes, sentence):
    asked = experiment("k80", "ring", 4)

    def ask() -> None:
        simulate(spec.replace(asked, **{"model": "resnet50", **changes}))

    with pytest.raises(SpecError, match="fix") as raised:
        ask()
    assert sentence in str(raised.value)
