"""Bad input: one sentence and the fix, exit status 2, nothing written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import job, main


def test_graphs_of_a_gpu_are_refused_where_there_is_none(in_empty_folder, capsys, monkeypatch):
    monkeypatch.setattr(job, "_gpus", lambda: 0)
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "--graph", "on"])
    assert stop.value.code == 2
    assert "leave --graph out" in capsys.readouterr().err


STALE = "server:mode=bounded,staleness=0,staleness_aware=true"
NOT_BUILT_IN = 'model: "nope" is not a built-in model.'


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--bach", "3"], "--batch"),
        (["train", "--architecture", "rign"], 'did you mean "ring"'),
        (["train", "--architecture", "ring:buckt=3"], 'did you mean "bucket"'),
        (["train", "--architecture", "pipeline"], "stages x replicas"),
        (["train", "--architecture", "replicated", "--workers", "2"], "replicated:devices=2"),
        (
            ["train", "-a", "pipeline:schedule=interleaved,microbatches=5", "--workers", "2"],
            "write microbatches=4",
        ),
        (["train", "-a", "pipeline:schedule=1F1B", "--workers", "2"], "gpipe, 1f1b or interleaved"),
        (["predict", "-a", "replicated:devices=2"], "replicated cannot be predicted yet"),
        (
            ["predict", "-a", "pipeline:schedule=interleaved,microbatches=5", "--workers", "2"],
            "write microbatches=4",
        ),
        (["train", "--precision", "fp16"], "precision"),
        (["train", "--model", "resnet5"], 'did you mean "resnet50"'),
        (["train", "--data", "cifar"], 'did you mean "cifar10"'),
        (["train", "--model", "gpt-small", "--data", "mnist"], "gpt-small cannot train on mnist"),
        (["train", "--workers", "0"], "workers = 0 is not at least 1"),
        (["train", "--batch", "-3"], "batch = -3 is negative"),
        (["train", "--on", "moon"], '--on: "moon" is no value of it'),
        (["train", "--on-loss", "never"], '--on-loss: "never" is no value of it'),
        (["train", "--on-loss", "never"], "fix: write stop or continue."),
        (["train", "--servers", "x"], '--servers: "x" is not a whole number'),
        (["run", "-n", "two", "a.py"], '--workers: "two" is not a whole number'),
        (["train", "--epochs", "x"], "write a number"),
        (["run", "-n", "2", "-a", "pipeline", __file__], "a script cannot be pipeline"),
        (["train", "--workers", "2", "-a", "server:mode=async,update=worker"], "drift apart"),
        (["train", "absent.toml"], "there is no such file"),
        (["run", "absent.py"], "there is no file absent.py"),
        (["run", "/tmp"], "SCRIPT: /tmp is a folder, and holds no __main__.py"),
        (["train", "--steps", "5", "--steps", "3"], "--steps: it is given 2 times"),
        (["train", "-a", "ring", "--architecture=server"], "--architecture: it is given 2 times"),
        (["run", "-n", "2", "-n", "3", __file__], "--workers: it is given 2 times"),
        (["train", "--balance"], "--balance: it divides each batch among workers"),
        (["train", "-a", "single", "--balance"], "there is one worker"),
        (["train", "--data-dir", "/tmp"], "shapes samples are computed here"),
        (["train", "--data", "synthetic", "--data-dir", "/tmp"], "read from no folder"),
        (
            ["compare", "--architectures", "ring", "--workers", "2", "--data-dir", "/tmp"],
            "read from no folder",
        ),
        (["train", "--workers", "2", "-a", STALE], "no gradient is stale"),
        (["train", "--model", "nope"], NOT_BUILT_IN),
        (["profile", "--model", "nope"], NOT_BUILT_IN),
        (["predict", "--model", "nope", "-a", "ring", "--link", "1gbit"], NOT_BUILT_IN),
        (["predict", "--model", "nope", "--device", "k80"], NOT_BUILT_IN),
        (["predict", "--model", "nope", "--one-device", "50", "-a", "ring"], NOT_BUILT_IN),
        (["advise", "--model", "nope"], NOT_BUILT_IN),
        (["advise", "--model", "resnet5", "--device", "k80"], 'did you mean "resnet50"'),
        (["trian"], "train"),
        (["train", "--epochs", "inf"], "epochs = inf"),
        (["train", "--lr", "inf"], "learning_rate"),
        (["train", "--batch", "0"], "--batch: 0 of it is none"),
        (["train", "--threads", "1000000"], "more than any machine has cores"),
        (["train", "--workers", "1000000", "-a", "ring"], "1000000 members are more than"),
        (["train", "--link", "1gbit"], "add --on tunnel"),
        (["train", "--device", "k80"], "add --on tunnel"),
        (["train", "--cache"], "keeps decoded photographs, and shapes has none"),
        (["train", "--dilation", "inf"], "dilation = inf"),
        (["train", "--resume", "absent"], "absent does not exist"),
        (["train", "--data-dir", "absent"], "there is no folder absent"),
        (["train", "-a", "average:outer=nesterov,outer_learning_rate=nan"], "outer_learning_rate"),
        (["train", "-a", "average:outer_momentum=0.5", "--workers", "2"], "outer=nesterov"),
        (["watch", "run", "--port", "99999"], "99999 is not a port"),
        (["slurm", "-n", "2", "--name", "a\n#SBATCH --wrap=x", "--", "true"], "is no name that"),
        (["profile", "--model", "mnist-dnn", "--batch", "-1"], "--batch: -1"),
        (["profile", "--model", "mnist-dnn", "--shape", "99999x99999x99999"], "is no shape"),
    ],
)
def test_bad_input(arguments, complaint, in_empty_folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert complaint in said.err
    assert "fix:" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "member 5 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "abc"}, "not a host and a port"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, 'RANK = "x"'),
        ({"RANK": "0", "WORLD_SIZE": "0", "MASTER_PORT": "29500"}, "member 0 of 0"),
    ],
)
def test_a_launcher_that_makes_no_sense(variables, complaint, in_empty_folder, capsys, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "--steps", "1"])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_nothing_is_written_where_nothing_can_be(in_empty_folder, capsys):
    Path("file").write_text("")
    for out in ("file/run", "file"):
        with pytest.raises(SystemExit) as stop:
            main.main(["train", "--steps", "1", "--out", out])
        assert stop.value.code == 2
    assert "file is a file" in capsys.readouterr().err


def test_hosts_are_of_the_tunnel(in_empty_folder, capsys):
    Path("e.toml").write_text("[[cluster.hosts]]\ncount = 1\n")
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "e.toml"])
    assert stop.value.code == 2
    assert "add --on tunnel" in capsys.readouterr().err


def test_dry_run_prints_an_experiment_that_can_be_run(in_empty_folder, capsys):
    from paceline import spec

    arguments = ["train", "--architecture", "ring", "--workers", "2", "--batch", "8", "--dry-run"]
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 0
    Path("e.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    experiment = spec.load(Path("e.toml"))
    assert experiment.architecture == spec.Ring()
    assert experiment.workload.batch == 8
    assert list(Path().iterdir()) == [Path("e.toml")]


@pytest.mark.parametrize("verb", main.VERBS)
def test_every_verb_has_help_with_an_example(verb):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"Examples?: paceline", " ".join(done.stdout.split()))
