"""`explain`, `report` and `watch` as a user types them."""

import json

import pytest

from paceline.cli.main import main
from tests.support.synthetic import Times, synchronous_run


@pytest.fixture
def run(tmp_path):
    return synchronous_run(tmp_path / "slow-2", slow={"worker1": Times(forward=0.05)})


@pytest.fixture
def single(tmp_path):
    return synchronous_run(tmp_path / "single-1", workers=1, architecture="single")


def test_explain_prints_the_verdict_and_its_proof(run, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["explain", str(run.path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Waiting for worker1 takes")
    assert "ready_seconds: worker1 was last" in printed
    assert "shares = [" in printed


def test_explain_beside_a_baseline_gives_one_json_object(run, single, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["explain", str(run.path), str(single.path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["baseline"] == "single-1"
    assert found["causes"][0]["name"] == "slow-worker"
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["step_seconds"])


def test_report_writes_a_page_beside_the_run(run, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(run.path), "--export", "csv,mllog"])
    printed = capsys.readouterr().out.split()
    assert {path.rpartition(".")[2] for path in printed} == {"csv", "mllog"}
    assert (run.path / "exports" / "csv" / "table.csv").is_file()


@pytest.mark.parametrize("verb", ["explain", "report", "watch"])
def test_what_is_no_run_is_said_with_the_runs_that_are_there(verb, run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([verb, str(tmp_path)])
    said = capsys.readouterr().err
    assert "has no run.json" in said
    assert str(run.path) in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [run.path.name]


def test_a_misspelt_export_is_bad_input(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run.path), "--export", "tracee"])
    assert 'did you mean "trace"' in capsys.readouterr().err
    assert not (run.path / "exports").exists()
