"""gloo takes whoever calls first for a member; the members find out before a value travels.

The stranger here calls from inside a worker, between the moment at which gloo listens and the one
at which others learn where: nobody can be earlier.
"""

import contextlib
import socket
import struct
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from paceline import spec
from paceline.architectures.pipeline import PipelineModel
from paceline.builtin import loop
from paceline.collectives import proof
from paceline.collectives.group import Group
from paceline.errors import ExchangeError
from paceline.record import RunFolder
from paceline.testing import run_members

SECONDS = 100.0
GLOO_NUMBERS = range(8)
"""By which gloo tells its callers apart; a group of two uses the first few."""


class Stranger:
    """Calls at each port that gloo opens in this process, the first `times` times."""

    def __init__(self, times):
        self.lines, self._times = [], times
        self._listen = dist.ProcessGroupGloo.create_device
        dist.ProcessGroupGloo.create_device = self.create_device

    def create_device(self, **options):
        before = listening()
        device = self._listen(**options)
        # What it says is waited for in vain; what members say, as long as a busy machine takes.
        proof.PROOF_SECONDS = 3.0 if self._times > 0 else SECONDS
        if self._times > 0:
            self._times -= 1
            for address in listening() - before:
                self.lines += [call(address, number) for number in GLOO_NUMBERS]
        return device

    def leave(self):
        """All that it heard."""
        dist.ProcessGroupGloo.create_device = self._listen
        heard = b""
        for line in self.lines:
            line.settimeout(0.2)
            with contextlib.suppress(OSError):
                heard += line.recv(1 << 16)
            line.close()
        return heard


def listening():
    found = psutil.Process().net_connections("tcp")
    return {one.laddr for one in found if one.status == psutil.CONN_LISTEN}


def call(address, number):
    line = socket.create_connection(address)
    line.sendall(struct.pack("<q", number))
    return line


def sum_among_strangers(session, times):
    """The sum of all ranks and one, or the error; and what the stranger heard."""
    stranger = Stranger(times)
    flat = torch.full((1000,), session.rank + 1.0)
    try:
        group = Group(session.context(torch.device("cpu"), 7), "gloo")
        group.all_reduce(flat).wait()
    except ExchangeError as error:
        return str(error), stranger.leave()
    return flat.tolist(), stranger.leave()


def among_strangers(times):
    ring = spec.Ring()
    return run_members(
        sum_among_strangers, times, workers=2, architecture=ring, timeout_seconds=SECONDS
    )


def test_a_stranger_in_a_members_place_hears_no_gradient_and_the_members_meet_again():
    found = among_strangers(times=1)
    assert any(heard for _, heard in found), "the stranger was taken for a member"
    for total, heard in found:
        assert total == [3.0] * 1000
        assert len(heard) < 400, "a proof at most"


def test_where_strangers_come_each_time_the_job_stops_with_a_sentence():
    found = among_strangers(times=99)
    for error, heard in found:
        assert "did not prove" in error
        assert len(heard) < 400 * proof.TRIES


def pipe_and_look(session):
    """How many ports this worker has when its first step begins, and how many answer a call."""
    forward, seen = PipelineModel.forward, []

    def look(self, *batch):
        if not seen:
            ports = listening()
            seen.append((len(ports), sum(map(answers, ports))))
        return forward(self, *batch)

    PipelineModel.forward = look
    folder = RunFolder(Path(session.identity.run))
    loop.train(folder.experiment(), session, folder)
    return seen[0]


def answers(address):
    with socket.socket() as line:
        line.settimeout(0.5)
        return line.connect_ex(address) == 0


def test_nobody_is_answered_at_a_pipelines_ports_once_it_trains(tmp_path):
    workload = {"model": "mnist-dnn", "data": "synthetic", "global_batch": 8, "steps": 2}
    experiment = spec.replace(
        spec.Experiment(), architecture=spec.Pipeline(), workers=2, **workload
    )
    folder = RunFolder.create(tmp_path / "run", experiment)
    found = run_members(
        pipe_and_look,
        workers=2,
        architecture=spec.Pipeline(),
        folder=folder,
        timeout_seconds=SECONDS,
    )
    assert found == [(3, 1), (2, 0)], "the store's alone, which worker 0 keeps"
