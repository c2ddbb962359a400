"""`--dry-run` refuses what the same command without it would refuse, in the same words."""

import pytest

from paceline.cli import main

HOSTS = """
engine = "tunnel"
architecture = "ring"
workload = {model = "googlenet", data = "synthetic", steps = 3}
cluster = {workers = 3, device = "k80", hosts = [{workers = 1}]}
"""
TUNNEL = ["--on", "tunnel", "--data", "synthetic", "--workers", "2", "--steps", "3"]
PREDICT = ["--on", "predict", "--workers", "2", "--architecture", "ring"]
STAGES = ["--model", "resnet50", "--architecture", "pipeline:microbatches=2"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["hosts.toml"], "the hosts hold 1 workers"),
        ([*TUNNEL, "--device", "k80", "--model", "mnist-cnn"], "no float32 profile of mnist-cnn"),
        ([*TUNNEL, "--device", "zzz", "--model", "resnet50"], '"zzz" is not a device'),
        ([*TUNNEL, "--device", "k80", *STAGES], "stages compute for real, and k80 is emulated"),
        ([*PREDICT, "--device", "zzz", "--model", "resnet50"], '"zzz" is not a device'),
        ([*PREDICT, "--model", "resnet50"], "nothing is known of resnet50 on this machine"),
        (["--workers", "2", "-a", "server:compression=int8"], "gradients do not leave this host"),
    ],
    ids=["hosts", "profile", "device", "pipeline", "predicted-device", "predicted-cpu", "server"],
)
def test_what_cannot_be_run_is_refused(asked, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.toml").write_text(HOSTS)
    with pytest.raises(SystemExit) as stop:
        main.main(["train", *asked, "--dry-run"])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.toml"]


def test_what_can_be_run_is_shown(capsys):
    asked = ["train", *TUNNEL, "--device", "k80", "--model", "resnet50", "--architecture", "ring"]
    with pytest.raises(SystemExit) as stop:
        main.main([*asked, "--dry-run"])
    assert stop.value.code == 0
    assert 'model = "resnet50"' in capsys.readouterr().out


def test_a_paper_whose_samples_are_computed_takes_no_folder(tmp_path, capsys):
    """`reproduce all --data-dir` names it for the others."""
    with pytest.raises(SystemExit) as stop:
        main.main(["reproduce", "p1-fig8", "--data-dir", str(tmp_path), "--dry-run"])
    assert stop.value.code == 0
    assert "data_dir" not in capsys.readouterr().out
