"""A user's own script: three lines more, the same loop, any number of workers."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

SCRIPT = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

session = paceline.init()
torch.manual_seed(0)
inputs = torch.randn(96, 5)
samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(samples, batch_size={batch}, shuffle=True)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = paceline.distribute(model, optimizer)
loader = paceline.shard(loader, batch="global", shares={shares})
for epoch in range(2):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        paceline.report_loss(loss)
        optimizer.step()
print("keys", sorted(model.state_dict()), "weights", model.state_dict()["weight"].sum().item())
"""


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments], capture_output=True, text=True, check=False
    )


def weights(text: str) -> list[float]:
    return [float(line.split("weights")[1]) for line in text.splitlines() if "weights" in line]


@pytest.mark.parametrize("shares", [pytest.param(None, marks=pytest.mark.slow), [3, 1]])
def test_two_workers_end_with_one_workers_weights(in_empty_folder, shares):
    Path("train.py").write_text(SCRIPT.format(batch=16, shares=shares), encoding="utf-8")
    Path("alone.py").write_text(SCRIPT.format(batch=16, shares=None), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    alone = subprocess.run(
        [sys.executable, "alone.py"], env=environment, capture_output=True, text=True, check=True
    )
    assert "keys ['bias', 'weight']" in alone.stdout
    done = paceline("run", "-n", "2", "--architecture", "ring", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 12
    assert summary["loss"]["last"] < summary["loss"]["first"]
    assert done.stderr.count("keys ['bias', 'weight']") == 2  # as without Paceline
    assert weights(done.stderr) == pytest.approx(weights(alone.stdout) * 2, rel=1e-5)


def test_a_script_that_fails_ends_the_job_with_its_words(in_empty_folder):
    Path("bad.py").write_text(
        "import paceline, time\n"
        "if paceline.init().rank == 1: raise ValueError('my own mistake')\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    done = paceline("run", "-n", "2", "--architecture", "ring", "bad.py")
    assert done.returncode == 1
    assert "worker1 exited 1" in done.stderr
    assert "my own mistake" in done.stderr.split("error: worker1 exited 1")[1]


def test_a_refusal_on_worker_0_is_the_message_and_ends_the_others_at_once(in_empty_folder):
    Path("refused.py").write_text(
        "import paceline\n"
        "from paceline.errors import SpecError\n"
        "if paceline.init().rank == 0: raise SpecError('here', 'it cannot be.', 'do not.')\n"
        "from paceline.session import start, stores\n"
        "stores.agree(start.current().store, start.current().identity, 'never', None)\n",
        encoding="utf-8",
    )
    done = paceline("run", "-n", "2", "--architecture", "ring", "refused.py")
    assert done.returncode == 1
    assert done.stderr.endswith("error: worker0: here: it cannot be.\n  fix: do not.\n")


OWN_GROUP = """
import torch, torch.distributed as dist, paceline
dist.init_process_group("gloo")
rank = dist.get_rank()
session = paceline.init()
assert (session.rank, session.identity.launcher) == (rank, "paceline")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for step in range(2):
    model(torch.full((4, 2), rank + 1.0)).sum().backward()
    optimizer.step()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("sum", total.item())
"""


def test_torchs_own_groups_work_beside_ours_in_several_jobs_at_once(in_empty_folder):
    Path("own.py").write_text(OWN_GROUP, encoding="utf-8")
    flags = {"ring": [], "average": [], "server": ["--servers", "1"]}
    start = [sys.executable, "-m", "paceline", "run", "-n", "2"]
    with ExitStack() as stack:
        jobs = {}
        for name, more in flags.items():
            jobs[name] = subprocess.Popen(
                [*start, "--architecture", name, "--out", name, *more, "own.py"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(jobs[name].communicate)
            stack.callback(jobs[name].kill)
        for name, job in jobs.items():
            out, err = job.communicate(timeout=110)
            assert job.returncode == 0, f"{name}: {err}"
            assert sorted(out.splitlines()) == ["sum 3.0", "worker1 | sum 3.0"], name
