"""An emulated device takes the profiled time, on one schedule, and looks like the real model."""

import pytest
import torch
from torch.nn import functional

from paceline import models, spec
from paceline.compute import emulated
from paceline.compute.emulated import EmulatedModel, Pace, model_for, skip_updates
from paceline.served.weights import make_remote
from paceline.spec.profile import DeviceProfile, Layer, find_profile


class FakeTime:
    """A clock that only sleeping moves, and that oversleeps."""

    def __init__(self, oversleep_seconds: float = 0.0) -> None:
        self.now, self.slept, self._oversleep = 100.0, 0.0, oversleep_seconds

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds + self._oversleep


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime(oversleep_seconds=0.0002)
    monkeypatch.setattr(emulated, "time", fake)
    return fake


def tutorial(batch: int = 32, forward: float = 0.010, backward: float = 0.020) -> DeviceProfile:
    model = models.build("tutorial-cnn")
    named = [(n, m) for n, m in model.named_modules() if list(m.parameters(recurse=False))]
    layers = tuple(
        Layer(
            name=name,
            forward_seconds=forward,
            backward_seconds=backward,
            parameter_bytes=sum(4 * p.numel() for p in module.parameters(recurse=False)),
        )
        for name, module in named
    )
    return DeviceProfile(
        device="toy",
        model="tutorial-cnn",
        batch=batch,
        input_shape=(3, 32, 32),
        kind="measured",
        source="a test",
        layers=layers,
    )


def one_step(model: torch.nn.Module, batch: int = 32) -> None:
    targets = torch.zeros(batch, dtype=torch.long)
    functional.cross_entropy(model(torch.zeros(batch, 1)), targets).backward()


def test_a_step_takes_the_profiled_time_and_errors_do_not_add_up(clock):
    model, steps = EmulatedModel(tutorial(), Pace()), 10
    began = clock.now
    for _ in range(steps):
        one_step(model)
    # Each of the 100 wake-ups is 0.2 ms late; only that of the last layer of a pass is seen.
    assert clock.now - began == pytest.approx(steps * 5 * 0.030, rel=0.02)


def test_times_follow_the_batch(clock):
    model = EmulatedModel(tutorial(batch=32), Pace())
    began = clock.now
    one_step(model, batch=64)
    assert clock.now - began == pytest.approx(2 * 5 * 0.030, rel=0.02)


def test_slow_jittery_and_pausing_devices(clock):
    pauses = {1: 7.0}
    pace = Pace(slowdown=2.0, events=lambda step: (3.0 if step > 1 else 1.0, pauses.get(step, 0.0)))
    model, taken = EmulatedModel(tutorial(), pace), []
    for _ in range(3):
        began = clock.now
        one_step(model)
        taken.append(clock.now - began)
    assert taken == pytest.approx([0.30, 7.30, 0.90], rel=0.02)
    jittery = EmulatedModel(tutorial(), Pace(jitter_fraction=0.2, seed=1))
    began = clock.now
    one_step(jittery)
    assert clock.now - began != pytest.approx(0.15, rel=0.01)


def test_late_weights_hold_the_device_back_and_nothing_else_does(clock):
    model = EmulatedModel(tutorial(), Pace())
    first, last = model.get_submodule("features.0"), model.get_submodule("classifier.4")
    waits = {first: 0.0005, last: 0.100}  # hooks that compute a little, and hooks that wait

    def hook(module, inputs):
        clock.now += waits[module]

    for module in waits:
        module.register_forward_pre_hook(hook)
    began = clock.now
    one_step(model)
    assert clock.now - began == pytest.approx(5 * 0.030 + 0.100, rel=0.02)


class LateParameter(torch.nn.Parameter):
    """Weights that come from a server: whatever function takes them waits for them first."""

    clock: FakeTime

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        if function is torch.Tensor.detach:
            cls.clock.now += 0.100
        return super().__torch_function__(function, types, arguments, named or {})


def test_weights_that_are_waited_for_when_they_are_used_hold_the_device_back(clock):
    model = EmulatedModel(tutorial(), Pace())
    LateParameter.clock = clock
    model.get_submodule("features.3").bias.__class__ = LateParameter
    one_step(model)
    began = clock.now
    one_step(model)
    assert clock.now - began == pytest.approx(0.150 + 0.100, abs=0.001)


def test_it_has_the_real_models_parameters_and_state():
    profile = find_profile("h200", "resnet50")
    model, real = EmulatedModel(profile, Pace()), models.build("resnet50")
    shapes = {name: value.shape for name, value in real.state_dict().items()}
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    assert sum(4 * p.numel() for p in model.parameters()) == profile.parameter_bytes


def test_gradients_have_the_real_size_and_are_not_copied(clock):
    model = EmulatedModel(tutorial(), Pace())
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    one_step(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    places = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(places) == 1, "all gradients are views of one buffer"
    assert ready[0].startswith("classifier.4")
    assert ready[-1].startswith("features.0")


def test_updates_are_skipped_and_hooks_still_run():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    skip_updates(optimizer)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    weight.grad = torch.ones(3)
    optimizer.step()
    assert steps == [1]
    assert torch.equal(weight, torch.ones(3))


def test_an_optimizer_that_asks_servers_goes_on_asking():
    class Owner:
        asked = 0

        def step(self) -> bool:
            self.asked += 1
            return True

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    owner = Owner()
    make_remote(optimizer, owner)
    skip_updates(optimizer)
    optimizer.step()
    assert owner.asked == 1


def test_only_the_tunnel_emulates_and_each_host_has_its_own_device():
    here = spec.Experiment(cluster=spec.Cluster(device="k80"))
    assert model_for(here, "worker0") is None
    mixed = spec.Experiment(
        engine="tunnel",
        architecture=spec.Ring(),
        cluster=spec.Cluster(workers=2, hosts=(spec.Host(device="k80"), spec.Host())),
    )
    assert model_for(mixed, "worker0") is not None
    assert model_for(mixed, "worker1") is None
