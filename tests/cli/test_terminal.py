"""What a terminal of 80 columns shows, and what is printed for other programs to read."""

import json
import math
import os
import re
import subprocess
import sys
import tomllib

import msgspec
import pytest
import torch

from paceline import engines, report, spec
from paceline.cli import console, job, tables
from paceline.cli.main import VERBS, main
from paceline.compute import profiling
from tests.support.synthetic import synchronous_run


def run(*arguments, columns=80):
    """The command as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": str(columns)},
        check=False,
    )


def test_asking_for_nothing_is_asking_for_help():
    done = run()
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in VERBS)


def test_help_lists_no_engine_that_is_not_there():
    printed = " ".join(run("train", "--help").stdout.replace("│", " ").split())
    said = re.search(r"Engine: ([\w, ]+)\.", printed)[1]
    assert set(re.findall(r"\w+", said)) - {"or"} == set(engines.ENGINES)


LONG = "server:mode=bounded,staleness=4,placement=optimal,transport=tcp,chunk=256KiB,window=16"


def test_a_dry_run_prints_a_file_that_can_be_read_back(capsys):
    arguments = ["train", "--architecture", LONG, "--workers", "3", "--servers", "1", "--dry-run"]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    read = spec.from_tables(tomllib.loads(capsys.readouterr().out), "printed")
    assert spec.format_architecture(read.architecture) == LONG
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    assert spec.from_tables(json.loads(capsys.readouterr().out), "printed") == read


def test_a_dry_comparison_prints_a_file_that_can_be_read_back(capsys, tmp_path):
    arguments = ["compare", "--architectures", f"ring {LONG}", "--workers", "2", "--dry-run"]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    file = tmp_path / "comparison.toml"
    file.write_text(capsys.readouterr().out)
    assert LONG in spec.load_comparison(file).compare.architectures
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["compare"]["workers"] == [2]


def test_no_line_of_an_explanation_is_wider_than_the_terminal(tmp_path):
    run_folder = synchronous_run(tmp_path / "run", link="100mbit", exchange_seconds=0.4)
    done = run("explain", str(run_folder.path))
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout


WARNING_MODEL = """
import warnings

import torch


def build():
    warnings.warn("a library's own worry", stacklevel=1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
"""


@pytest.mark.parametrize("asked", ["", "default"])
def test_warnings_of_libraries_are_shown_to_those_who_ask(tmp_path, asked):
    (tmp_path / "worried.py").write_text(WARNING_MODEL)
    given = ["train", "--model", "worried:build", "--steps", "2", "--workers", "2"]
    paths = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *given, "--architecture=ring", f"--out={tmp_path}/run"],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": paths, **({"PYTHONWARNINGS": asked} if asked else {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("own worry" in done.stdout + done.stderr) == bool(asked)


def test_a_loss_that_is_no_number_is_said_so(tmp_path):
    run_folder = synchronous_run(
        tmp_path / "run", losses=lambda step: math.nan if step >= 10 else 2.3
    )
    with console.out.capture() as captured:
        console.out.print(job.table(run_folder.summary()))
    assert "2.3000 → not a number from step 10 on" in captured.get()


def test_profiling_tells_how_far_it_is(tmp_path):
    told = []
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    profiling.profile(model, (8,), batch=4, num_classes=2, repeats=2, progress=told.append)
    assert told == list(range(1, profiling.num_passes(batch=4, repeats=2) + 1))


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_comparison_fits_the_terminal_and_cuts_nothing(tmp_path, monkeypatch, repeats):
    runs = [
        synchronous_run(tmp_path / name, architecture=kind, workers=workers)
        for name, kind, workers in (
            ("a-run-with-a-long-name", "server:placement=colocated", 2),
            ("another", "ring", 4),
        )
    ]
    monkeypatch.setattr(console.out, "_width", 80)
    rows = report.from_runs(runs).rows
    for row in rows:
        row.repeats = repeats  # a spread stands beside the rate, and leaves less room for names
        row.samples_per_second = msgspec.structs.replace(
            row.samples_per_second, median=12345.6, low=12344.5, high=12346.7
        )
        row.speedup, row.efficiency, row.trains_like_single = 3.0, 0.75, True
    with console.out.capture() as captured:
        for table in tables.rich_tables(rows):
            console.out.print(table)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert captured.get().count("placement=colocated") == 3
    assert "…" not in captured.get()
