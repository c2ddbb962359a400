"""What a GPU cannot do is said in one sentence with the fix, and at once."""

import time

import pytest
import torch

from paceline import spec
from paceline.cli import main
from paceline.errors import MemberError
from paceline.testing import run_members

AT_ONCE_SECONDS = 10.0
"""No member has been started."""

REFUSED = {
    "nccl": (
        ["--architecture", "ring:backend=nccl", "--workers", str(torch.cuda.device_count() + 1)],
        "NCCL needs one for each",
        "leave backend out",
    ),
    "nccl-average": (
        ["--architecture", "average:backend=nccl", "--workers", str(torch.cuda.device_count() + 1)],
        "NCCL needs one for each",
        "leave backend out",
    ),
}


@pytest.mark.parametrize(("arguments", "problem", "fix"), REFUSED.values(), ids=REFUSED)
def test_refused_at_once(tmp_path, monkeypatch, capsys, arguments, problem, fix):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        main.main(["train", *arguments, "--steps", "3"])
    assert stop.value.code == 2
    assert time.monotonic() - began < AT_ONCE_SECONDS
    said = " ".join(capsys.readouterr().err.split())
    assert problem in said
    assert fix in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def all_reduce(session):
    weight = torch.nn.Linear(2, 2).cuda()
    session.distribute(weight, torch.optim.SGD(weight.parameters(), lr=0.1))


def on_two_devices(session):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).cuda())
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("work", "text", "workers", "told"),
    [
        (all_reduce, "ring:backend=nccl", torch.cuda.device_count() + 1, "NCCL needs one for each"),
        (on_two_devices, "server:placement=colocated", 1, "have the model on one device"),
    ],
    ids=["nccl", "two-devices"],
)
def test_a_script_is_refused_by_its_member(work, text, workers, told):
    with pytest.raises(MemberError) as refused:
        run_members(work, workers=workers, architecture=spec.parse_architecture(text))
    assert told in str(refused.value)
