"""What is learned from two steps of somebody's own script, and that prediction takes it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.cli import main
from paceline.session.observers import script_profile
from paceline.session.observers.script_profile import ScriptProfile
from paceline.spec.profile import DeviceProfile, Layer, load_profile, save_profile


def done(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 0


class Ticking:
    """A clock that a layer moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """A linear layer whose passes take a time of their own."""

    def __init__(self, clock: Ticking, forward: float, backward: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.clock, self.seconds = clock, (forward, backward)

    def forward(self, x):
        x = Tick.apply(x, self.clock, 0.0, self.seconds[1])
        return Tick.apply(self.inner(x), self.clock, self.seconds[0], 0.0)


class Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.backward_seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward_seconds
        return gradient, None, None, None


def test_layers_take_what_they_took_and_together_what_a_step_takes(tmp_path, monkeypatch):
    clock = Ticking()
    monkeypatch.setattr(script_profile, "time", clock)
    model = nn.Sequential(Slow(clock, 1.0, 3.0), nn.ReLU(), Slow(clock, 2.0, 4.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = ScriptProfile(tmp_path / "mine.json")
    profile.watch(model, optimizer)
    ended = []

    def train() -> None:
        for step in range(10):
            clock.now += 0.5  # input
            with torch.no_grad():
                model(torch.ones(7, 4))  # a look that trains nothing
            optimizer.zero_grad()
            x = torch.ones(3, 4, requires_grad=True)
            model(x).sum().backward()
            clock.now += 0.25  # between backward and the step
            optimizer.step()
            ended.append(step)

    with pytest.raises(SystemExit):
        train()
    assert ended == [0, 1]  # and the third, in which it ended
    found = load_profile(tmp_path / "mine.json")
    assert found.batch == 3
    assert found.input_shape == (4,)
    assert [layer.name for layer in found.layers] == ["0.inner", "2.inner"]
    assert [layer.parameter_bytes for layer in found.layers] == [80, 80]
    whole = sum(x.forward_seconds + x.backward_seconds for x in found.layers)
    assert whole == pytest.approx(3.0 + 0.5 + 1.0 + 2.0 + 3.0 + 4.0 + 0.25)
    assert found.layers[1].forward_seconds == pytest.approx(2.0)


SCRIPT = """
import torch, paceline
paceline.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""


def profiled(folder: Path, steps: int) -> "subprocess.CompletedProcess[str]":
    (folder / "mine.py").write_text(SCRIPT.replace("STEPS", str(steps)))
    line = ["-m", "paceline", "run", "--profile", "mine.json", "mine.py"]
    return subprocess.run(
        [sys.executable, *line],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_script_is_timed_ended_and_predicted(tmp_path, monkeypatch, capsys):
    ended = profiled(tmp_path, 1000)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["step", "0", "step", "1"]
    monkeypatch.chdir(tmp_path)
    line = ["predict", "--device", "mine.json", "--architecture", "ring", "--link", "1gbit"]
    done([*line, "--workers", "1,4", "--json"])
    one, four = json.loads(capsys.readouterr().out)["points"]
    profile = load_profile(tmp_path / "mine.json")
    assert profile.batch == 16
    assert one["samples_per_second"] == pytest.approx(16 / profile.step_seconds(16), rel=0.01)
    assert four["samples_per_second"] < 4 * one["samples_per_second"]


def test_a_script_of_too_few_steps_is_told_so(tmp_path):
    ended = profiled(tmp_path, 2)
    assert ended.returncode == 2
    assert "before its third step" in ended.stderr


def test_a_file_is_replaced_only_by_a_profile_and_only_if_it_is_one(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"my": "notes"}')
    ended = profiled(tmp_path, 1000)
    assert ended.returncode == 2
    assert "exists and is not a device profile" in ended.stderr
    assert file.read_text() == '{"my": "notes"}'
    layer = Layer(name="a", forward_seconds=1.0, backward_seconds=1.0, parameter_bytes=4)
    old = DeviceProfile(
        device="cpu",
        model="mine",
        batch=1,
        input_shape=(1,),
        kind="measured",
        source="",
        layers=(layer,),
    )
    save_profile(old, file)
    assert profiled(tmp_path, 2).returncode == 2
    assert load_profile(file) == old
    assert not list(tmp_path.glob(".profile-*"))
