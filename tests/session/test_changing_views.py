"""Workers join and fail in one job, without servers: every participant ends with equal weights."""

import pytest

from tests.support.by_hand import Job

STEPS, BATCH, WORKERS = 80, 12, 3


def weights(said):
    (line,) = [line for line in said.splitlines() if line.startswith("weights")]
    return [float(value) for value in line.split()[1:]]


def sizes(said):
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("step ")]


def end(job, *failed):
    """All but the failed end well, with the same weights; what each has said."""
    ended = job.endings(but=failed[0]) if len(failed) == 1 else job.endings()
    for name in failed:
        ended.pop(name, None)
    assert {name: status for name, (status, _) in ended.items()} == dict.fromkeys(ended, 0), ended
    said = {name: text for name, (_, text) in ended.items()}
    first, *others = map(weights, said.values())
    assert all(other == pytest.approx(first, abs=1e-6) for other in others)
    return said


@pytest.mark.parametrize("failed", ["worker3", "worker0"])
def test_a_worker_fails_after_another_has_joined(tmp_path, failed):
    """The joined one, and worker 0, which had started the coordinator."""
    gate = (str(tmp_path / "gate"),)
    with Job(tmp_path, "ring:bucket=1KiB", WORKERS, 0, STEPS, gate, "continue") as job:
        job.join("worker3")
        job.kill(failed, 3 if failed == "worker3" else 55)
        said = end(job, failed)
    assert 3 in sizes(said["worker1"]), "it had joined"
    assert sizes(said["worker1"])[-1] == BATCH // 3


def test_two_workers_that_fail_in_one_moment_are_survived(tmp_path):
    with Job(tmp_path, "ring", 4, 0, STEPS, on_loss="continue") as job:
        job.kill("worker1", 6)
        job.kill("worker0", 0)
        said = end(job, "worker0", "worker1")
    assert sizes(said["worker3"])[-1] == BATCH // 2


def test_a_worker_joins_after_worker_0_has_failed(tmp_path):
    """The coordinator outlives worker 0, and keeps the store that it asks."""
    with Job(tmp_path, "ring", WORKERS, 0, 10 * STEPS, on_loss="continue") as job:
        job.kill("worker0", 6)
        job.join("worker3")
        job.kill("worker3", 3)
        said = end(job, "worker0", "worker3")
    assert 4 in sizes(said["worker1"]), "it had joined"
