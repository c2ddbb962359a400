"""Whether a run still runs is known from its launcher, not only from what was written last."""

import os
import subprocess
import sys

import msgspec
import pytest

from paceline import spec
from paceline.errors import RecordError
from paceline.record import MemberRecord, RunFolder, summarise
from paceline.record.liveness import Launcher, is_gone, this_process


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", spec.Experiment())


def launched_by(folder, launcher):
    folder.write("launcher.json", msgspec.json.encode(launcher))


def test_a_living_launcher_is_running(folder):
    assert not is_gone(this_process())
    assert folder.summary().status == "running"


@pytest.mark.parametrize(
    "changes",
    [{"pid": 2**22 + 1}, {"start_ticks": 1}, {"boot": "another"}],
    ids=["no such process", "its number is another's now", "the machine was started anew"],
)
def test_a_launcher_that_is_gone_leaves_a_killed_run(folder, changes):
    launched_by(folder, msgspec.structs.replace(this_process(), **changes))
    assert folder.summary().status == "killed"


def test_a_process_that_nobody_has_waited_for_is_gone(folder):
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie now
    launcher = msgspec.structs.replace(this_process(), pid=child.pid)
    assert is_gone(launcher)
    child.wait()


def test_a_launcher_on_another_host_is_not_judged(folder):
    launched_by(folder, Launcher(host="elsewhere", boot="x", pid=1, start_ticks=1))
    assert folder.summary().status == "running"


def test_what_was_written_at_the_end_is_believed(folder):
    summarise(folder, "finished")
    launched_by(folder, msgspec.structs.replace(this_process(), start_ticks=1))
    assert folder.summary().status == "finished"


def test_a_member_that_failed_makes_it_a_failed_run(folder):
    """Under another launcher nobody is left to say so."""
    folder.write_member(MemberRecord(name="worker0", role="worker", host="h", status="failed"))
    launched_by(folder, msgspec.structs.replace(this_process(), start_ticks=1))
    assert folder.summary().status == "failed"


def test_a_folder_of_an_older_version_is_read(folder):
    (folder.path / "launcher.json").unlink()
    assert folder.summary().status == "running"
    old = '{"format_version":1,"status":"finished","name":"t","engine":"here","architecture":"ring"'
    old += (
        ',"workers":2,"servers":0,"model":"t.py","data":"its own","global_batch":64,"members":[]}'
    )
    (folder.path / "run.json").write_text(old, encoding="utf-8")
    assert folder.summary().subject == "t.py"


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=r"file/run cannot be written: Not a directory\."):
        RunFolder.create(tmp_path / "file" / "run", spec.Experiment())
