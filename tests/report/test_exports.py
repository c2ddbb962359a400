"""What other tools are given: everything on one clock, every number traceable to the record."""

import csv
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise

import pytest

from paceline import record, spec
from paceline.errors import SpecError
from paceline.report.exports import EXPORTS, export
from tests.support.synthetic import START, Times, synchronous_run


@pytest.fixture
def run(tmp_path):
    slow = {"worker1": Times(forward=0.03)}
    return synchronous_run(
        tmp_path / "run",
        slow=slow,
        clock_offsets={"worker1": 7.0},
        servers=1,
        architecture="server",
    )


def test_traces_are_on_one_clock(run, tmp_path):
    whole, *ranks = export("trace", run, tmp_path / "out")
    spans = [e for e in json.loads(whole.read_bytes())["traceEvents"] if e["ph"] == "X"]
    steps = [e for e in spans if e["name"] == "ProfilerStep#3"]
    assert len(steps) == 2
    assert steps[0]["ts"] == pytest.approx(steps[1]["ts"], abs=1)
    assert len(ranks) == 2


def test_each_worker_has_a_file_that_names_its_rank(run, tmp_path):
    _, *ranks = export("trace", run, tmp_path / "out")
    # The way Holistic Trace Analysis finds a file's rank, which compact JSON would escape.
    found = [re.search(r'"rank":\s+(\d+)', file.read_text()) for file in ranks]
    assert [match and match[1] for match in found] == ["0", "1"]
    about = [json.loads(file.read_bytes())["distributedInfo"] for file in ranks]
    assert [info["rank"] for info in about] == [0, 1]
    assert {info["world_size"] for info in about} == {2}


def test_phases_of_a_step_follow_each_other_inside_it(run, tmp_path):
    _, first, _ = export("trace", run, tmp_path / "out")
    spans = [e for e in json.loads(first.read_bytes())["traceEvents"] if e["ph"] == "X"]
    step = next(e for e in spans if e["name"] == "ProfilerStep#5")
    inside = [e for e in spans if e["args"]["step"] == 5 and e is not step]
    assert [e["name"] for e in inside][:3] == ["input", "forward", "backward"]
    for before, after in pairwise(inside):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.01)
    assert inside[-1]["ts"] + inside[-1]["dur"] <= step["ts"] + step["dur"] + 0.01


def test_mllog_lines_start_and_stop_the_run(run, tmp_path):
    (file,) = export("mllog", run, tmp_path / "out")
    lines = file.read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    entries = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    keys = [entry["key"] for entry in entries]
    assert "run_start" in keys
    assert keys[-1] == "run_stop"
    assert keys.count("train_loss") == 40
    assert [e["time_ms"] for e in entries] == sorted(e["time_ms"] for e in entries)


def test_csv_has_a_line_per_step_and_per_sample(run, tmp_path):
    table, steps, series = export("csv", run, tmp_path / "out")
    with steps.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 80
    assert float(lines[0]["start_seconds"]) == pytest.approx(START)
    with table.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["samples_per_second.median"]) == run.summary().samples_per_second
    with series.open(newline="") as file:
        assert {line["member"] for line in csv.DictReader(file)} == {
            "worker0",
            "worker1",
            "server0",
        }


READ_BACK = """
import sys
from pathlib import Path
from paceline.record import RunFolder
from paceline.report.exports import export
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

(file,) = export("tensorboard", RunFolder(Path(sys.argv[1])), Path(sys.argv[2]))
events = EventAccumulator(str(file.parent), size_guidance={"tensors": 0})
events.Reload()
print([event.tensor_proto.float_val[0] for event in events.Tensors("loss")])
"""


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_the_losses_back(run, tmp_path):
    # A process of its own: TensorBoard loads TensorFlow where it is, which changes the environment.
    argv = [sys.executable, "-c", READ_BACK, str(run.path), str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=100)
    losses = json.loads(done.stdout)
    assert len(losses) == 40
    assert losses[0] == pytest.approx(run.summary().loss.first)
    assert losses[-1] == pytest.approx(run.summary().loss.last)


def test_an_unknown_export_is_named_with_the_known_ones(run, tmp_path):
    with pytest.raises(SpecError, match='did you mean "trace"'):
        export("trase", run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert set(EXPORTS) == {"trace", "tensorboard", "mllog", "csv"}


def test_what_only_a_script_knows_is_not_invented(run, tmp_path):
    workload = spec.Workload(script=spec.Script(path="/a/train.py", arguments=("--lr", "1")))
    asked = spec.replace(run.experiment(), workload=workload)
    run.write("experiment.toml", spec.to_toml(asked).encode())
    record.summarise(run, "finished")
    (log,) = export("mllog", run, tmp_path / "out")
    lines = [json.loads(line.partition(" ")[2]) for line in log.read_text().splitlines()]
    values = {line["key"]: line["value"] for line in lines}
    assert values["submission_benchmark"] == "train.py --lr 1"
    assert not {"global_batch_size", "seed", "opt_name", "opt_base_learning_rate"} & values.keys()
    assert all("samples_count" not in line["metadata"] for line in lines)
    table = next(file for file in export("csv", run, tmp_path / "out") if file.stem == "table")
    (row,) = csv.DictReader(table.open())
    assert row["script"] == "train.py --lr 1"
    assert not any(row.get(name) for name in ("model", "data", "batch", "global_batch"))
