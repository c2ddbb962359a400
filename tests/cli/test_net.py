"""`paceline net` and `paceline profile`: what they print and write, and what they refuse."""

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.spec.profile import load_profile


def run(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    return stop.value.code


def test_net_between_two_processes_as_json_and_chart(in_empty_folder, capsys):
    assert run(["net", "--largest", "4KiB", "--json", "--chart", "net.svg"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (pair,) = answer["pairs"]
    assert [row["bytes"] for row in pair["rows"]] == [1, 4, 16, 64, 256, 1024, 4096]
    assert Path("net.svg").read_text(encoding="utf-8").startswith("<svg")


def test_profile_writes_a_file_that_can_be_used(in_empty_folder, capsys):
    arguments = ["profile", "--model", "adult-dnn", "--batch", "8", "--repeats", "2"]
    assert run([*arguments, "--name", "mine", "--json"]) == 0
    profile = load_profile(Path("mine-adult-dnn-float32.json"))
    assert profile.kind == "measured"
    assert profile.parameter_bytes == 4 * (123 * 200 + 200 + 200 * 100 + 100 + 100 * 2 + 2)
    assert json.loads(capsys.readouterr().out)["batch"] == 8


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["net", "--on", "moon"], '"moon" has no network'),
        (["net", "--on", "tunnel", "--hosts", "many"], '"many" is not a number'),
        (["net", "--on", "tunnel", "--hosts", "²"], "is not a number"),
        (["net", "--on", "tunnel", "--hosts", "9" * 5000], "is not a number"),
        (["net", "--on", "tunnel", "--hosts", "100000"], "4,999,950,000 pairs"),
        (["net", "--hosts", "a,b"], "PACELINE_KEY is not set"),
        (["net", "--largest", "big"], 'size "big"'),
        (["profile", "--model", "resnet5"], 'did you mean "resnet50"'),
        (["profile", "--model", "resnet50", "--device", "gpu"], '"gpu" is not known'),
        (["profile", "--model", "resnet50", "--shape", "3by3"], '"3by3" is no shape'),
    ],
)
def test_bad_input(arguments, complaint, in_empty_folder, monkeypatch, capsys):
    monkeypatch.delenv("PACELINE_KEY", raising=False)
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert "fix:" in said.err
    assert list(Path().iterdir()) == []
