"""Whole searches, by the command, with real runs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("optuna", reason="the extra `search` is not installed")

from paceline import spec
from paceline.record import RunFolder
from paceline.search import running
from paceline.search.folder import SearchFolder
from paceline.spec.search import SearchQuestion, search_of

SCRIPT = """
import argparse, time, torch, paceline
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seconds", type=float, default=0.0)
options = parser.parse_args()
paceline.init()
torch.manual_seed(0)
width = paceline.setting("hidden", 8)
layers = torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
model, optimizer = paceline.distribute(model, optimizer)
for step in range(30):
    generator = torch.Generator().manual_seed(step)
    samples = torch.randn(16, 4, generator=generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(samples), samples.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    time.sleep(options.seconds)
"""


def start(*arguments):
    command = [sys.executable, "-m", "paceline", "search", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def search(*arguments):
    process = (
        start(*arguments, "--json", "--no-page") if "--json" not in arguments else start(*arguments)
    )
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.fixture
def script(in_empty_folder):
    in_empty_folder.joinpath("train.py").write_text(SCRIPT, encoding="utf-8")
    return "train.py"


def outcome(trials):
    return [(t["settings"], t["state"], t.get("value")) for t in trials]


@pytest.mark.timeout(400)
def test_a_search_over_a_script_finds_repeats_and_its_best_runs_again(script, in_empty_folder):
    tried = ["--try", "--lr=0.0001..0.3:log", "--try", "setting.hidden=4,16", "--trials", 5]
    status, out, err = search(*tried, "--out", "one", "--json", "--no-page", script)
    assert status == 0, err
    found = json.loads(out)
    assert len(found["trials"]) >= 5
    states = {trial["state"] for trial in found["trials"]}
    assert states <= {"complete", "pruned", "same"}
    best = found["best"]
    assert best["value"] == min(t["value"] for t in found["trials"] if t["state"] == "complete")

    file = in_empty_folder / "one" / "search.toml"
    status, again, err = search("--out", "two", "--json", "--no-page", file)
    assert status == 0, err
    assert outcome(json.loads(again)["trials"]) == outcome(found["trials"])

    command = [sys.executable, "-m", "paceline", "run", "--json", "one/best.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    run = json.loads((in_empty_folder / "one" / best["run"] / "run.json").read_text())
    assert json.loads(done.stdout)["loss"]["last"] == run["loss"]["last"]


@pytest.mark.timeout(400)
def test_a_killed_search_continues_with_the_same_number_of_trials(script, in_empty_folder):
    tried = ["--try", "--lr=0.001,0.01,0.1,0.2", "--sampler", "grid", "--pruner", "none"]
    process = start(*tried, "--out", "s", "--no-page", script, "--seconds", "0.1")
    started = in_empty_folder / "s" / "trials" / "001" / "run" / "members" / "worker0.steps.jsonl"
    until = time.monotonic() + 180
    while not (started.exists() and started.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert started.exists(), "the second trial never began"

    status, out, err = search("--resume", "s", "--json", "--no-page")
    assert status == 0, err
    trials = json.loads(out)["trials"]
    assert sorted(trial["settings"]["--lr"] for trial in trials) == [0.001, 0.01, 0.1, 0.2]
    assert all(trial["state"] == "complete" for trial in trials)
    assert [trial["number"] for trial in trials] == [
        0,
        2,
        3,
        4,
    ]  # 1 was interrupted: it came again as 4


def test_a_setting_that_no_code_asks_for_ends_the_search(script):
    status, _, err = search("--try", "setting.hiden=4..8", "--json", "--out", "s", script)
    assert status == 2
    assert "never asked for setting.hiden" in err


@pytest.mark.timeout(400)
def test_settings_that_mean_the_same_are_run_once(in_empty_folder):
    """Servers do not apply to `ring`: two settings are one experiment."""
    status, out, err = search(
        *("--goal", "throughput", "--try", "architecture=ring,server", "--try", "servers=1,4"),
        *("--on", "predict", "--device", "k80", "--link", "1gbit", "--model", "alexnet"),
        *("--data", "synthetic", "--workers", 4, "--steps", 3, "--json", "--out", "s"),
    )
    assert status == 0, err
    found = json.loads(out)
    rates = {(t["settings"]["architecture"], t["settings"]["servers"]): t for t in found["trials"]}
    assert found["best"]["settings"] == {"architecture": "server", "servers": 4}
    assert {rates["ring", 1]["state"], rates["ring", 4]["state"]} == {"complete", "same"}
    assert rates["ring", 1]["value"] == rates["ring", 4]["value"]


def test_predictions_decide_what_is_not_run(tmp_path, monkeypatch):
    """The first trial measures more than the second can reach by its prediction."""
    started = []

    class Finished:
        """A trial that has ended before anybody looks: its rate is ten times its batch."""

        seconds, status = 1.0, 0

        def __init__(self, path, experiment):
            started.append(experiment.workload.batch)
            path.mkdir(parents=True)
            (path / "experiment.toml").write_text(spec.to_toml(experiment), encoding="utf-8")
            self.folder = RunFolder.create(path / "run", experiment)
            summary = self.folder.summary()
            summary.status = "finished"
            summary.samples_per_second = 10.0 * experiment.workload.batch
            self.folder.write_summary(summary)

        def losses(self):
            return {}

        def unasked_settings(self):
            return []

        def end(self):
            pass

        ask_to_end = end

    monkeypatch.setattr(running, "TrialProcess", Finished)
    cluster = spec.Cluster(workers=2, link="1gbit", device="k80")
    experiment = spec.Experiment(
        workload=spec.Workload(model="tutorial-cnn", data="synthetic"),
        architecture=spec.Ring(),
        cluster=cluster,
        engine="tunnel",
    )
    tried = {"try": {"batch": "1,2,4096"}, "goal": "throughput", "trials": 3}
    asked = SearchQuestion(experiment=experiment, search=search_of(tried, "x"))
    folder = SearchFolder.create(tmp_path / "s", asked)
    entries = running.Searching(folder, lambda state: None).run()
    assert started == [4096]
    assert (entries[0].settings["batch"], entries[0].state) == (4096, "complete")
    assert {entry.state for entry in entries[1:]} == {"left out"}
    assert all(entry.predicted["high"] < 40960 for entry in entries[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to try"),
        (["--try", "batch"], "NAME=VALUES"),
        (["--try", "batch=1,2", "--goal", "cost"], "needs a price"),
        (["--try", "batch=1,2", "--price", "two"], "is not a price"),
        (["--try", "batch=1,2", "nowhere.toml"], "no such file"),
        (["--try", "--lr=1,2", "nowhere.py"], "there is no file"),
        (["--resume", "nowhere"], "is not the folder of a search"),
        (["--try", "architecture=rnig"], "rnig"),
        (["--try", "batch=-4,-8"], "negative"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(in_empty_folder, arguments, message):
    status, out, err = search(*arguments, "--json")
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert not list(in_empty_folder.iterdir())
