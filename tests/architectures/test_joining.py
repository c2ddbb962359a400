"""A worker joins a job that runs, and takes part from then on."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from unittest import mock

import msgspec
import pytest
import torch

from paceline import spec
from paceline.architectures.server import build
from paceline.autograd.trained import Trained
from paceline.errors import SpecError
from paceline.launch import Identity, invitation
from paceline.record import RunFolder
from paceline.record.liveness import this_process
from paceline.session import stores
from paceline.session.join_obstacle import KEY, UNDIVIDED
from paceline.session.joining import announce, check, join
from tests.support.by_hand import PROGRAM, Job
from tests.support.threads import context

STEPS, SECONDS = 120, 150.0


def run(*arguments, **environment):
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, env=told, stdout=pipe, stderr=pipe, text=True)


def ended(process):
    """What it printed; it must have ended well."""
    said, complained = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, complained
    return said.splitlines()


def weights(lines):
    (found,) = [line.split()[1:] for line in lines if "weights" in line]
    return [float(value) for value in found if value != "weights"]


@pytest.fixture(scope="module")
def alone():
    """The weights that one worker makes of the same batches."""
    return weights(ended(run(sys.executable, PROGRAM, str(STEPS), "0")))


def train_and_join(tmp_path, architecture, *more, servers=1, end=ended, **environment):
    """Two workers, servers, and one who joins: their run folder, and what it printed."""
    folder, gate = tmp_path / "run", tmp_path / "gate"
    command = (sys.executable, "-m", "paceline", "run")
    script = (str(PROGRAM), str(STEPS), "0.03", str(gate))
    asked = (
        "-n",
        "2",
        "--servers",
        str(servers),
        "--architecture",
        architecture,
        "--out",
        str(folder),
    )
    job = run(*command, *asked, *more, *script, **environment)
    try:
        while not (folder / invitation.FILE).exists():
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.05)
        newcomer = run(*command, "--join", str(folder), *script, **environment)
        try:
            printed = end(newcomer)
        finally:
            newcomer.kill()
            newcomer.communicate()
        ended(job)
    finally:
        job.kill()
        job.communicate()
    assert not (folder / invitation.FILE).exists()
    return RunFolder(folder), printed


def log(folder, name):
    text = (folder.path / "logs" / f"{name}.log").read_text(encoding="utf-8")
    return text.splitlines()


def parts(lines):
    """The sizes of the parts that were trained on."""
    return [int(line.rpartition(" ")[2]) for line in lines if "step" in line]


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_in_step_the_batch_is_shared_with_the_newcomer_and_training_is_the_same(
    tmp_path, transport, alone
):
    folder, printed = train_and_join(tmp_path, f"server:update=server,transport={transport}")
    check_joined(folder, printed, alone)
    assert {member.name for member in folder.members()} == {
        "worker0",
        "worker1",
        "worker2",
        "server0",
    }


@pytest.mark.parametrize(
    "architecture", ["ring", "ring:bucket=1KiB", "hybrid", "average:state=true"]
)
def test_a_worker_joins_without_servers_too(tmp_path, architecture, alone):
    """A view lets it in: weights, momentum and the place in the batches come from a participant."""
    folder, printed = train_and_join(tmp_path, architecture, "--on-loss", "continue", servers=0)
    check_joined(folder, printed, alone)


def test_a_joined_worker_goes_by_the_schedule_of_the_others(tmp_path):
    """Its own schedule began when it came, and would be far behind."""
    decayed = weights(ended(run(sys.executable, PROGRAM, str(STEPS), "0", DECAY="0.97")))
    more = ("--on-loss", "continue")
    folder, printed = train_and_join(tmp_path, "ring", *more, servers=0, DECAY="0.97")
    check_joined(folder, printed, decayed)


def test_without_servers_one_who_joined_may_leave_too(tmp_path):
    more = ("--on-loss", "continue")
    folder, printed = train_and_join(tmp_path, "ring", *more, servers=0, GUEST="10")
    assert parts(printed) == [4] * 10
    first, second = (log(folder, f"worker{rank}") for rank in range(2))
    joined, shared = parts(first).index(4), parts(first).count(4)
    assert 10 <= shared <= 11, "one batch may have been divided with it"
    assert parts(first) == [6] * joined + [4] * shared + [6] * (STEPS - joined - shared)
    assert weights(first) == weights(second)
    texts = [event.text for event in folder.events()]
    told = f"worker2 takes part in no step from {joined + 10} on"
    assert any(text.startswith(told) for text in texts), texts


def check_joined(folder, printed, alone):
    """Thirds of each batch from one step on, and the weights that one worker makes of it."""
    own, first = parts(printed), parts(log(folder, "worker0"))
    assert len(first) == STEPS
    joined = first.index(4)
    assert first == [6] * joined + [4] * (STEPS - joined), "thirds from one step on"
    assert own == [4] * (STEPS - joined)
    assert joined > 48
    assert own, "it came too late"
    for lines in (printed, log(folder, "worker0"), log(folder, "worker1")):
        assert weights(lines) == pytest.approx(alone, abs=1e-4)
    notes = [event.text for event in folder.events()]
    assert any(text.startswith(f"worker2 joined after step {joined - 1}") for text in notes)
    assert folder.steps("worker2")[0].step == joined


@pytest.mark.parametrize("mode", ["sync,update=server", "bounded,staleness=1"])
def test_one_who_joined_may_leave_and_the_others_share_the_batch_again(tmp_path, mode):
    folder, printed = train_and_join(tmp_path, f"server:mode={mode}", GUEST="10")
    assert parts(printed) == [4] * 10
    first, second = (parts(log(folder, f"worker{rank}")) for rank in range(2))
    assert len(first) == len(second) == STEPS
    joined = first.index(4)
    assert first[:joined] == [6] * joined
    assert 10 <= first.count(4) <= 13, "until those who had divided it with the guest are told"
    shared = joined + first.count(4)
    assert first[shared:] == [6] * (STEPS - shared)
    told = f"worker2 takes part in no step from {joined + 10} on"
    if first.count(4) > 10:
        told += f"; {4 * (first.count(4) - 10)} of its samples were not seen"
    texts = [event.text for event in folder.events() if event.kind in ("warning", "note")]
    assert f"{told}; 2 workers share the batch from {shared} on" in texts
    ends = [weights(log(folder, f"worker{rank}")) for rank in range(2)]
    assert ends[0] == ends[1]


def failed(process):
    said, complained = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "it fails here" in complained
    return said.splitlines()


@pytest.mark.parametrize(
    "transport", ["tcp,chunk=256B", pytest.param("shm", marks=pytest.mark.slow)]
)
def test_where_one_who_joined_fails_the_others_go_on(tmp_path, transport):
    told = {"end": failed, "FAILS": "worker2:10"}
    folder, printed = train_and_join(
        tmp_path, f"server:update=server,transport={transport}", **told
    )
    assert parts(printed) == [4] * 10
    first, second = (log(folder, f"worker{rank}") for rank in range(2))
    assert len(parts(first)) == len(parts(second)) == STEPS
    assert parts(first)[-40:] == [6] * 40
    assert weights(first) == weights(second)


def test_one_joins_in_the_place_of_one_who_has_failed(tmp_path):
    more, told = ("--on-loss", "continue"), {"FAILS": "worker1:20"}
    folder, printed = train_and_join(tmp_path, "server:update=server,transport=tcp", *more, **told)
    first = parts(log(folder, "worker0"))
    assert len(first) == STEPS
    assert 12 in first[20:], "it was alone for a while"
    assert first[-20:] == parts(printed)[-20:] == [6] * 20
    assert weights(log(folder, "worker0")) == weights(printed)


@pytest.mark.slow
def test_the_comparison_notices_a_newcomer_that_brings_nothing(tmp_path, alone):
    folder, _ = train_and_join(tmp_path, "server:update=server", IDLE="1")
    assert weights(log(folder, "worker0")) != pytest.approx(alone, abs=1e-3)


def test_at_its_own_pace_the_newcomers_gradients_are_applied(tmp_path):
    options, gate = "server:mode=async,transport=tcp", str(tmp_path / "gate")
    with Job(tmp_path, options, workers=2, servers=1, steps=STEPS, more=(gate,)) as job:
        job.join("worker2")
        for name, (status, said) in job.endings().items():
            assert status == 0, f"{name}: {said}"
        own = parts(job.said("worker2").splitlines())
    assert 0 < len(own) < STEPS - 40, "it goes on where the others were"
    (server,) = [member for member in job.folder.members() if member.role == "server"]
    applied = {name: sum(found.values()) for name, found in server.counters["staleness"].items()}
    chunks = applied["worker0"] / STEPS
    assert applied["worker2"] == chunks * len(own)


SCRIPT = spec.Script(path=str(PROGRAM))


@contextlib.contextmanager
def as_program():
    """This process is one that runs the script."""
    named = {"__spec__": None, "__file__": str(PROGRAM)}
    main = mock.patch.multiple(sys.modules["__main__"], create=True, **named)
    with main, mock.patch.object(sys, "argv", [str(PROGRAM)]):
        yield


def look(newcomer):
    check(newcomer, SCRIPT)


REFUSED = ["single", "ring", "average", "hybrid", "replicated", "pipeline"]
REFUSED += ["server:placement=colocated", "server:placement=optimal"]


@pytest.fixture
def opened():
    """Worker 0's store, with what it says of a job; who could join it."""
    with contextlib.ExitStack() as stack:

        def open_job(architecture):
            door = socket.create_server(("127.0.0.1", 0))
            where, key = f"127.0.0.1:{door.getsockname()[1]}", "a key of this test"
            given = {"coordinator": where, "coordinator_descriptor": door.detach(), "key": key}
            worker0 = Identity(workers=2, servers=1, local_members=3, **given)
            store = stack.enter_context(contextlib.closing(stores.open_store(worker0)))
            with as_program():
                announce(store, worker0, spec.parse_architecture(architecture))
            return store, invitation.identify({invitation.VARIABLE: where, "PACELINE_KEY": key})

        yield open_job


@pytest.mark.parametrize("asks", [join, look])
@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_take_a_worker_in_says_so(architecture, asks, opened):
    _, newcomer = opened(architecture)
    told = r"--join: the job trains by .* its workers stay the same"
    with pytest.raises(SpecError, match=told):
        asks(newcomer)


@pytest.mark.parametrize("asks", [join, look])
def test_a_script_that_divides_nothing_takes_nobody_in(asks, opened):
    store, newcomer = opened("server")
    store.set(KEY, UNDIVIDED)
    with pytest.raises(SpecError, match=r"takes batches that paceline.shard did not divide"):
        asks(newcomer)
    store.set(KEY, "")
    asks(newcomer)


def test_one_who_came_as_the_job_ended_hears_so_at_once(opened):
    """It knows its own number where it asks, so that it takes no other's place."""
    store, newcomer = opened("server")
    store.set(KEY, "")
    known, _, own = join(newcomer)
    assert own.identity.name == known.name == "worker2"
    store.close()
    surroundings = dataclasses.replace(context(2, 3), identity=known, store=own)
    model = torch.nn.Linear(5, 1)
    trained = Trained(model, [torch.optim.SGD(model.parameters(), lr=0.01)])
    with pytest.raises(SpecError, match="the job ended before this worker got in"):
        build(spec.Server(update="server"), surroundings).distribute(trained)


def test_one_who_comes_after_the_end_does_not_wait_as_founders_do(opened):
    store, newcomer = opened("server")
    store.set(KEY, "")
    look(newcomer)
    store.close()
    began = time.monotonic()
    with pytest.raises(SpecError, match="nobody answers"):
        join(newcomer)
    assert time.monotonic() - began < 20.0


def test_another_key_is_told_in_a_sentence(opened):
    _, newcomer = opened("server")
    stranger = msgspec.structs.replace(newcomer, key="another")
    with pytest.raises(SpecError, match="do not know the same key"):
        look(stranger)


def test_where_nobody_listens_that_is_said_within_seconds():
    with socket.create_server(("127.0.0.1", 0)) as door:
        where = f"127.0.0.1:{door.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(SpecError, match=f"nobody answers at {where}"):
        look(invitation.identify({invitation.VARIABLE: where, "PACELINE_KEY": "any"}))
    assert time.monotonic() - began < 10.0


OWN_BATCHES = """
import time
import torch
import paceline

paceline.init()
torch.manual_seed(0)
model = torch.nn.Linear(5, 1)
model, optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
x = torch.randn(12, 5)
for _ in range(80):
    own = torch.arange(12)[paceline.rank() :: paceline.workers()]
    optimizer.zero_grad()
    model(x[own]).square().mean().backward()
    optimizer.step()
    time.sleep(0.1)
"""


def test_a_script_with_batches_of_its_own_is_not_joined_and_goes_on(tmp_path):
    """A newcomer would train on another's samples, and its end would be the end of the job."""
    folder, script = tmp_path / "run", tmp_path / "own.py"
    script.write_text(OWN_BATCHES)
    command = (sys.executable, "-m", "paceline", "run")
    asked = (
        "-n",
        "2",
        "--servers",
        "1",
        "--architecture",
        "server:update=server",
        "--out",
        str(folder),
    )
    job = run(*command, *asked, str(script))
    try:
        while not (folder / invitation.FILE).exists():
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.05)
        newcomer = run(*command, "--join", str(folder), str(script))
        _, told = newcomer.communicate(timeout=SECONDS)
        assert newcomer.returncode == 2
        assert "takes batches that paceline.shard did not divide" in told
        assert "Traceback" not in told
        ended(job)
    finally:
        job.kill()
        job.communicate()
    assert not any("joined" in event.text for event in RunFolder(folder).events())
    assert "worker2" not in {member.name for member in RunFolder(folder).members()}


def test_an_invitation_is_for_this_user_only(tmp_path):
    invitation.invite(tmp_path, Identity(coordinator="127.0.0.1:1", key="secret"))
    assert (tmp_path / invitation.FILE).stat().st_mode & 0o777 == 0o600
    assert invitation.read_invitation(str(tmp_path), {}).key == "secret"
    invitation.withdraw(tmp_path)
    with pytest.raises(SpecError, match="no job runs in"):
        invitation.read_invitation(str(tmp_path), {})
    for text in ("nowhere", "localhost:99999", "localhost:0", ":80"):
        with pytest.raises(SpecError, match="neither a run folder nor an address"):
            invitation.read_invitation(text, {})


def test_the_invitation_of_a_killed_launcher_is_void(tmp_path):
    invitation.invite(tmp_path, Identity(coordinator="127.0.0.1:1", key="secret"))
    mine = this_process()
    (tmp_path / "launcher.json").write_bytes(msgspec.json.encode(mine))
    assert invitation.read_invitation(str(tmp_path), {}).key == "secret"
    gone = msgspec.structs.replace(mine, start_ticks=mine.start_ticks + 1)
    (tmp_path / "launcher.json").write_bytes(msgspec.json.encode(gone))
    with pytest.raises(SpecError, match="was killed, and nobody answers"):
        invitation.read_invitation(str(tmp_path), {})
