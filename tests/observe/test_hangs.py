"""Who waits for whom, from what each rank was doing; and dumps that would run code."""

import os
import pickle

import pytest

from paceline.observe.hangs import Call, Standing, diagnose, standing_of
from paceline.observe.ring import plain_pickle


def call(number, name="all_reduce", sizes=((1024,),), line="train.py, line 42", group="0 default"):
    return Call(
        group=group,
        number=number,
        name=name,
        sizes=[list(size) for size in sizes],
        dtypes=["Float"],
        line=line,
    )


def test_a_missing_rank_is_named_with_what_it_did_last():
    found = diagnose(
        [
            Standing(rank=0, waits=call(57)),
            Standing(rank=1, waits=call(57)),
            Standing(rank=2, last=call(56, "broadcast"), line="train.py, line 30"),
        ],
        3,
    )
    assert found[0] == (
        "rank 0 and rank 1 wait in all_reduce number 57 of 1024 float (train.py, line 42) "
        "for rank 2."
    )
    assert "rank 2 is at train.py, line 30" in found[1]
    assert "broadcast number 56" in found[1]


def test_a_rank_that_has_ended_is_said_to_have():
    found = diagnose([Standing(rank=0, waits=call(3)), Standing(rank=1, ended="finished")], 2)
    assert "rank 0 waits" in found[0]
    assert "rank 1 has ended (finished)" in found[1]


def test_a_rank_without_a_word_is_missing_too():
    found = diagnose([Standing(rank=0, waits=call(3))], 2)
    assert found[0].endswith("for rank 1.")
    assert found[1] == "rank 1 left no word."


@pytest.mark.parametrize("other", [call(9, "broadcast"), call(9, sizes=((2048,),))])
def test_calls_of_one_number_that_differ(other):
    found = diagnose([Standing(rank=0, waits=call(9)), Standing(rank=1, waits=other)], 2)
    assert "different collectives" in found[0]
    assert "rank 0 all_reduce" in found[0]
    assert f"rank 1 {other.name}" in found[0]


def test_a_rank_behind_is_late_and_not_different():
    ahead = Standing(rank=0, waits=call(8), last=call(7))
    behind = Standing(rank=1, waits=call(7), last=call(6))
    found = diagnose([ahead, behind], 2)
    assert "different" not in found[0]


def test_only_the_ranks_of_a_group_are_missed():
    group = {"3": [0, 2]}
    found = diagnose(
        [
            Standing(rank=0, waits=call(5, group="3 data"), group_ranks=group),
            Standing(rank=1, line="train.py, line 8"),
            Standing(rank=2, line="train.py, line 9"),
        ],
        3,
    )
    assert found[0].endswith("for rank 2.")


def test_where_nobody_waits_there_is_nothing_to_say():
    assert diagnose([Standing(rank=0, line="train.py, line 1")], 1) == []


def test_a_dump_is_read_as_torch_writes_it():
    entry = {
        "record_id": 1, "process_group": ("0", "default_pg"), "collective_seq_id": 7,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 4]], "input_dtypes": ["Float"],
        "state": "scheduled", "retired": False, "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/d.py", "line": 1},
            {"name": "main", "filename": "/home/me/train.py", "line": 12},
        ],
    }  # fmt: skip
    done = {**entry, "record_id": 0, "collective_seq_id": 6, "state": "completed", "retired": True}
    dump = {
        "entries": [entry, done],
        "pg_config": {"0": {"name": "0", "desc": "", "ranks": "[0, 3]"}},
    }
    found = standing_of(3, dump)
    assert found.waits is not None
    assert (found.waits.number, found.waits.line) == (7, "train.py, line 12")
    assert found.last is not None
    assert found.last.number == 6
    assert found.group_ranks == {"0": [0, 3]}


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def test_a_pickle_that_would_run_code_is_refused():
    with pytest.raises(pickle.UnpicklingError, match="plain data"):
        plain_pickle(pickle.dumps({"entries": [Evil()]}))
    plain = {"entries": [{"a": (1, "b", None, True, 2.5)}]}
    assert plain_pickle(pickle.dumps(plain)) == plain
