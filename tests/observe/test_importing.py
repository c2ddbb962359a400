"""Runs from traces and dumps that other tools wrote; files that are damaged or hostile."""

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cli.runs import open_run
from paceline.errors import RecordError
from paceline.explain import explain
from paceline.observe import kineto
from paceline.observe.importing import import_folder, read_dump
from paceline.observe.kineto import read_trace

HERE = Path(__file__).parent / "traces"


@pytest.fixture
def traces(tmp_path):
    for rank in range(2):
        name = f"rank{rank}.pt.trace.json.gz"
        shutil.copy(HERE / name, tmp_path / name)
    return tmp_path


def test_traces_of_a_late_rank_give_its_verdict(traces):
    run = open_run(traces)
    summary = run.summary()
    assert (summary.engine, summary.architecture, summary.workers) == ("observe", "ddp", 2)
    found = explain(run)
    assert found.late is not None
    assert (found.late.worker, found.late.reason) == ("rank1", "overhead")
    assert found.late.seconds == pytest.approx(0.05, rel=0.3)
    assert found.causes[0].name == "slow-worker"
    assert "small-batch" not in [cause.name for cause in found.causes]
    assert (traces / "paceline-run" / "run.json").is_file()


def test_a_trace_is_a_device_to_predict_with(traces, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["predict", "--from", str(traces), "--link", "25gbit", "--workers", "1,8", "--json"])
    assert not stop.value.code
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["workers"] for point in points] == [1, 8]
    assert points[0]["step_seconds"] == pytest.approx(0.003, rel=0.9)


def test_a_run_of_pacelines_is_no_trace(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["predict", "--from", str(tmp_path), "--workers", "2"])
    assert "not a run folder" in capsys.readouterr().err


def test_a_second_look_reads_the_run_that_was_made(traces):
    first = import_folder(traces).path
    assert import_folder(traces).path == first


def test_a_small_chunk_reads_the_same(traces, monkeypatch):
    path = traces / "rank0.pt.trace.json.gz"
    whole = read_trace(path)
    monkeypatch.setattr(kineto, "CHUNK_BYTES", 4096)
    assert read_trace(path) == whole
    assert len(whole.steps) == 7
    assert len(whole.collectives) >= 7


def test_a_missing_rank_is_noted(traces):
    (traces / "rank1.pt.trace.json.gz").unlink()
    notes = import_folder(traces).summary().notes
    assert notes is not None
    assert "there is no trace of rank1" in notes[0]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


EVENT = '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1, "tid": 1}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no traceEvents"),
        ("{}", "no traceEvents"),
        ("not json at all", "no traceEvents"),
        ('{"traceEvents": [' + EVENT + ", " + EVENT, "truncated"),
        ('{"traceEvents": [' + EVENT + ', {"ph": "X", "na', "truncated"),
        ('{"traceEvents": [' + EVENT[:-1] + ",,}]}", "damaged"),
        ('{"distributedInfo": {"rank": "many"}, "traceEvents": []}', "not a trace"),
        ('{"distributedInfo": [1], "traceEvents": []}', "not a trace"),
        ('{"a": ' + "[" * 100_000 + ', "traceEvents": []}', "damaged"),
        ('{"traceEvents": [' + EVENT.replace('"ts": 1', '"ts": "x"') + "]}", "not a trace"),
        ('{"traceEvents": [' + EVENT.replace('"dur": 1', '"dur": null') + "]}", "not a trace"),
    ],
)
def test_a_trace_that_is_none_is_one_sentence(text, said, tmp_path):
    path = written(tmp_path / "x.pt.trace.json", text)
    with pytest.raises(RecordError, match=said) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_compressed_trace_that_is_cut_off(tmp_path):
    content = gzip.decompress((HERE / "rank0.pt.trace.json.gz").read_bytes())
    packed = gzip.compress(content)
    for kept in (10, len(packed) // 2, len(packed) - 4):
        path = tmp_path / "x.pt.trace.json.gz"
        path.write_bytes(packed[:kept])
        with pytest.raises(RecordError):
            read_trace(path)


def entry(number, *, done, name="all_reduce", size=8):
    return {
        "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "profiling_name": f"nccl:{name}", "input_sizes": [[size]], "input_dtypes": ["Float"],
        "state": "completed" if done else "started", "retired": done, "is_p2p": False,
        "time_created_ns": 1_000_000 * number,
        "frames": [{"name": "f", "filename": "/home/me/train.py", "line": 40 + number}],
    }  # fmt: skip


def dump(*entries):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


def test_dumps_of_a_job_that_timed_out_name_the_missing_rank(tmp_path):
    waits = dump(entry(1, done=True), entry(2, done=False))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(waits))
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(waits))
    (tmp_path / "nccl_trace_rank_2").write_bytes(pickle.dumps(dump(entry(1, done=True))))
    found = explain(open_run(tmp_path))
    assert "rank 0 and rank 1 wait in all_reduce number 2 of 8 float (train.py, line 42)" in (
        found.verdict
    )
    assert "for rank 2" in found.verdict
    assert "its last complete collective is all_reduce number 1" in found.verdict


def test_dumps_in_json_whose_order_differs(tmp_path):
    one = dump(entry(1, done=True), entry(2, done=False))
    other = dump(entry(1, done=True), entry(2, done=False, name="broadcast"))
    (tmp_path / "fr_rank0.json").write_text(json.dumps(one))
    (tmp_path / "fr_rank1.json").write_text(json.dumps(other))
    said = explain(open_run(tmp_path)).verdict
    assert "rank 0 all_reduce number 2" in said
    assert "rank 1 broadcast number 2" in said


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/paceline-was-here",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"entries": [Evil()]}),
        pickle.dumps(dump())[:20],
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        b'{"entries": 5}',
        b'{"entries": [',
        b'{"entries": ' + b"[" * 100_000,
    ],
)
def test_a_dump_that_is_damaged_or_hostile_is_one_sentence(content, tmp_path):
    path = tmp_path / "rank0"
    path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read_dump(path)
    assert "\n" not in str(caught.value)
    assert not Path("/tmp/paceline-was-here").exists()


@pytest.mark.parametrize("entries", [[5], [{"process_group": 3}], [{"input_sizes": "x"}], [None]])
def test_entries_of_another_form_are_one_sentence(entries, tmp_path):
    (tmp_path / "fr_rank0.json").write_text(json.dumps({"entries": entries, "pg_config": {}}))
    with pytest.raises(RecordError, match="unknown form"):
        import_folder(tmp_path)
