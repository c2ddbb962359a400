"""A job among strangers: whatever they send to its ports, it trains on as without them."""

import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from paceline import spec
from paceline.testing import run_members
from tests.hostile import answers, attack

GROWTH_BYTES = 30 << 20
DEADLINE_SECONDS = 240.0


def train_on(session, folder):
    """Steps on the same numbers every time, until the file `last` says which step is the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.distribute(model, optimizer)
    step, last, told = 0, None, folder / "last"
    while last is None or step < last:
        torch.manual_seed(1000 * step + session.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        step += 1
        if step == 3 and session.rank == 0:
            (folder / "job").write_text(str(psutil.Process().ppid()))
        if step % 20 == 0 and session.rank == 0:
            (folder / "progress").write_text(str(step))
        if last is None:
            time.sleep(0.005)  # whoever besieges it needs the cores too
            last = int(told.read_text()) if told.exists() else None
    session.architecture.settle()
    return step, [value.detach().numpy().tobytes() for value in model.parameters()]


class Job:
    """`train_on` in a thread's care, while the test does something else to it."""

    def __init__(self, folder: Path, options: spec.Architecture, servers: int) -> None:
        self.folder, self.results, self.error = folder, [], None
        self._arguments = {"workers": 2, "servers": servers, "architecture": options}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results = run_members(
                train_on, self.folder, timeout_seconds=DEADLINE_SECONDS, **self._arguments
            )
        except BaseException as error:
            self.error = error

    def members(self) -> list[psutil.Process]:
        text = self._read("job")
        return psutil.Process(int(text)).children()

    def addresses(self):
        """Every port and every abstract socket where a member listens."""
        found, names = set(), set()
        for member in self.members():
            listens = (c for c in member.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
            found |= {("127.0.0.1", connection.laddr.port) for connection in listens}
            names |= {connection.laddr for connection in member.net_connections("unix")}
        return sorted(found) + sorted(n[1:] for n in names if n.startswith("@paceline-"))

    def use(self) -> tuple[int, int]:
        """Bytes of memory, and open files."""
        members = self.members()
        return sum(m.memory_info().rss for m in members), sum(m.num_fds() for m in members)

    def progress(self) -> int:
        return int(self._read("progress"))

    def finish(self):
        self.end_after(200)
        self._thread.join(DEADLINE_SECONDS)
        if self.error is not None:
            raise self.error
        return self.results

    def end_after(self, steps: int) -> None:
        partial = self.folder / ".last"
        partial.write_text(str(steps + self.progress()))
        partial.replace(self.folder / "last")

    def _read(self, name: str) -> str:
        end = time.monotonic() + 60
        while time.monotonic() < end and self.error is None:
            path = self.folder / name
            if path.exists() and (text := path.read_text()):
                return text
            time.sleep(0.02)
        raise AssertionError(f"the job does not get on: {self.error}")


def undisturbed(folder: Path, options: spec.Architecture, servers: int, steps: int):
    (folder / "last").write_text(str(steps))
    arguments = {"workers": 2, "servers": servers, "architecture": options}
    return run_members(train_on, folder, timeout_seconds=DEADLINE_SECONDS, **arguments)


JOBS = {
    "tcp": (spec.Server(transport="tcp"), 1),
    "colocated": (spec.Server(placement="colocated"), 0),
    "ring": (spec.Ring(), 0),
}


def besiege(tmp_path: Path, name: str, messages: int) -> None:
    """The whole of it: strangers at every port, and the same numbers as without them."""
    options, servers = JOBS[name]
    folder, alone = tmp_path / "besieged", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    job = Job(folder, options, servers)
    try:
        addresses = [address for address in job.addresses() if answers(address)]
        # The store and each post; where gloo has met, nobody is answered any more.
        assert len(addresses) == {"tcp": 2, "colocated": 3, "ring": 1}[name]
        sent = attack(addresses, messages // 10, seed=0)
        memory, files = job.use()
        before = job.progress()
        attackers = [
            threading.Thread(target=attack, args=(addresses, messages * 3 // 10, seed))
            for seed in (1, 2, 3)
        ]
        for attacker in attackers:
            attacker.start()
        for attacker in attackers:
            attacker.join()
        assert sent > messages // 20, "they did get through to the ports"
        end = time.monotonic() + 60
        while job.progress() <= before and time.monotonic() < end:
            time.sleep(0.05)
        assert job.progress() > before, "training went on"
        time.sleep(6.0 if messages > 10_000 else 0.5)
        memory_after, files_after = job.use()
        assert memory_after - memory < GROWTH_BYTES
        assert files_after - files < 400, "those who say nothing are few"
    finally:
        results = job.finish()
    assert results == undisturbed(alone, options, servers, steps=results[0][0])


@pytest.mark.parametrize("name", JOBS)
def test_strangers_at_every_port_change_nothing(tmp_path, name):
    besiege(tmp_path, name, 700)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tcp", "colocated"])
def test_a_hundred_thousand_malformed_messages_change_nothing(tmp_path, name):
    besiege(tmp_path, name, 100_000)
