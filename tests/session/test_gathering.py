"""Records of members that do not see worker 0's folder find their way into it."""

from pathlib import Path

import pytest

from paceline import spec
from paceline.errors import ExchangeError
from paceline.record import RunFolder
from paceline.session import gathering

EXPERIMENT = spec.Experiment()


def test_a_copys_files_arrive_as_they_were(tmp_path: Path) -> None:
    mine = RunFolder.create(tmp_path / "here" / "run", EXPERIMENT)
    copy = gathering.make_copy(tmp_path / "there" / "run", EXPERIMENT)
    copy.write("members/worker1.json", b'{"name": "worker1"}')
    copy.write("members/worker1.steps.jsonl", "µ\n".encode())
    copy.write("members/worker11.json", b"another member's")
    gathering.unpack(mine, {"worker1": gathering.pack(copy, "worker1")})
    arrived = {path.name: path.read_bytes() for path in (mine.path / "members").iterdir()}
    assert arrived == {
        "worker1.json": b'{"name": "worker1"}',
        "worker1.steps.jsonl": "µ\n".encode(),
    }


def test_a_shared_folder_sends_nothing(tmp_path: Path) -> None:
    mine = RunFolder.create(tmp_path / "run", EXPERIMENT)
    mine.write("members/worker1.json", b"{}")
    assert gathering.pack(mine, "worker1") == ""


def test_two_members_of_a_host_share_a_copy(tmp_path: Path) -> None:
    first = gathering.make_copy(tmp_path / "run", EXPERIMENT)
    second = gathering.make_copy(tmp_path / "run", EXPERIMENT)
    assert first.path == second.path
    assert gathering.pack(second, "worker3") == "{}"


@pytest.mark.parametrize(
    "text", ['{"worker2.json": ""}', '{"worker1.x/../../escaped": ""}', "[1]", "nonsense"]
)
def test_a_member_writes_its_own_files_only(tmp_path: Path, text: str) -> None:
    mine = RunFolder.create(tmp_path / "run", EXPERIMENT)
    with pytest.raises(ExchangeError, match="worker1 sent"):
        gathering.unpack(mine, {"worker1": text})
    assert list((mine.path / "members").iterdir()) == []
