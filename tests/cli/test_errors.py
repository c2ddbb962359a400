"""Bad input: one sentence and the fix, exit status 2, nothing written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--bach", "3"], "--batch"),
        (["train", "--architecture", "rign"], 'did you mean "ring"'),
        (["train", "--architecture", "ring:buckt=3"], 'did you mean "bucket"'),
        (["train", "--architecture", "pipeline"], "stages x replicas"),
        (["train", "--architecture", "replicated", "--workers", "2"], "replicated:devices=2"),
        (["train", "--precision", "fp16"], "precision"),
        (["train", "--model", "resnet5"], 'did you mean "resnet50"'),
        (["train", "--data", "cifar"], 'did you mean "cifar10"'),
        (["train", "--model", "gpt-small", "--data", "mnist"], "gpt-small cannot train on mnist"),
        (["train", "--workers", "0"], "workers = 0 is not at least 1"),
        (["train", "--batch", "-3"], "batch = -3 is negative"),
        (["train", "--on", "moon"], "engine"),
        (["train", "absent.toml"], "there is no such file"),
        (["run", "absent.py"], "there is no file absent.py"),
        (["trian"], "train"),
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
