"""Members started by hand, without a launcher to notice: whoever dies is named at once.

The wait for anybody is 120 s, and these tests give up before it.
"""

import pytest

from tests.support.by_hand import Job


@pytest.mark.parametrize(
    ("architecture", "servers"),
    [
        pytest.param("server:mode=sync", 2, marks=pytest.mark.slow),
        ("server:mode=sync,transport=tcp", 1),
        ("server:mode=bounded,placement=colocated,transport=tcp", 0),
    ],
)
def test_where_all_are_waited_for_everybody_names_the_lost_worker(tmp_path, architecture, servers):
    with Job(tmp_path, architecture, workers=3, servers=servers) as job:
        job.kill("worker1")
        for name, (status, said) in job.endings(but="worker1").items():
            assert status == 1, f"{name} went on"
            # A seat without chunks does not know in which step.
            assert "worker1 was lost" in said, f"{name}: {said}"
            assert "no answer within" not in said


@pytest.mark.parametrize(
    "architecture",
    [
        "server:mode=async,transport=tcp",
        pytest.param("server:mode=async", marks=pytest.mark.slow),
        pytest.param("server:mode=quorum,quorum=2", marks=pytest.mark.slow),
    ],
)
def test_where_nobody_is_waited_for_the_others_go_on_and_the_record_says_so(tmp_path, architecture):
    with Job(tmp_path, architecture, workers=3, servers=1) as job:
        job.kill("worker1")
        for name, (status, said) in job.endings(but="worker1").items():
            assert status == 0, f"{name}: {said}"
        lost = [event for event in job.folder.events() if event.kind == "lost"]
        assert [event.text.partition(" in ")[0] for event in lost] == ["worker1 was lost"]
        states = {member.name: member.status for member in job.folder.members()}
        assert states == {
            "worker0": "finished",
            "worker1": "lost",
            "worker2": "finished",
            "server0": "finished",
        }


def test_a_lost_server_is_named_by_every_worker(tmp_path):
    with Job(tmp_path, "server:mode=async,transport=tcp", workers=2, servers=2) as job:
        job.kill("server1")
        ended = job.endings(but="server1")
        for name in ("worker0", "worker1"):
            status, said = ended[name]
            assert status == 1
            assert "server1 was lost in step " in said, said
