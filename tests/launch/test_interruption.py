"""Signals to the one who supervises: workers first, servers after them, and no patience twice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import Interrupted
from paceline.launch import MemberCommand, supervise
from paceline.launch.interruption import Interruption
from paceline.launch.process import Output

WAITS = "while :; do sleep 0.05; done"


def member(name: str, script: str) -> MemberCommand:
    return MemberCommand(
        name=name,
        argv=("sh", "-c", script),
        environment=dict(os.environ),
        serves=name.startswith("server"),
    )


def interrupted(
    *commands: MemberCommand,
    after: Path,
    numbers: tuple[int, ...] = (signal.SIGINT,),
    output: Output = lambda *said: None,
) -> Interrupted:
    """Send this process signals, one by one, once every member has made its file in `after`."""
    left = list(numbers)

    def tick() -> None:
        if left and len(list(after.glob("ready*"))) == len(commands):
            os.kill(os.getpid(), left.pop(0))

    with pytest.raises(Interrupted) as caught:
        supervise(commands, output=output, tick=tick, deadline_seconds=30)
    assert not left, "every signal was sent"
    return caught.value


def test_servers_stay_until_the_workers_have_ended(tmp_path: Path) -> None:
    look = f"sleep 0.3; kill -0 $(cat {tmp_path}/pid) && touch {tmp_path}/served; exit 0"
    error = interrupted(
        member("worker0", f"trap '{look}' INT; touch {tmp_path}/ready0; {WAITS}"),
        member("server0", f"echo $$ > {tmp_path}/pid; touch {tmp_path}/ready1; {WAITS}"),
        after=tmp_path,
    )
    assert (tmp_path / "served").exists()
    assert error.exit_status == 130


def test_what_servers_say_of_workers_that_were_asked_to_go_is_not_passed_on(tmp_path: Path) -> None:
    said: list[str] = []
    goes = f"touch {tmp_path}/gone; until [ -e {tmp_path}/said ]; do sleep 0.05; done; exit 0"
    sees = f"until [ -e {tmp_path}/gone ]; do sleep 0.05; done; echo worker0 was lost >&2"
    interrupted(
        member("worker0", f"trap '{goes}' INT; touch {tmp_path}/ready0; {WAITS}"),
        member("server0", f"touch {tmp_path}/ready1; {sees}; touch {tmp_path}/said; {WAITS}"),
        after=tmp_path,
        output=lambda name, *rest: said.append(name),
    )
    assert (tmp_path / "said").exists()
    assert "server0" not in said


def test_a_second_signal_ends_the_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.process.GRACE_SECONDS", 0.3)
    monkeypatch.setattr("paceline.launch.local.INTERRUPT_SECONDS", 1000.0)
    interrupted(
        member("worker0", f"trap '' INT TERM; touch {tmp_path}/ready0; {WAITS}"),
        after=tmp_path,
        numbers=(signal.SIGINT, signal.SIGINT),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_are_passed_on_as_they_are(tmp_path: Path, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    heard = f"trap 'touch {tmp_path}/heard; exit 0' {name}"
    error = interrupted(
        member("worker0", f"{heard}; touch {tmp_path}/ready0; {WAITS}"),
        after=tmp_path,
        numbers=(number,),
    )
    assert (tmp_path / "heard").exists()
    assert error.exit_status == 128 + number


def test_patience_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.local.INTERRUPT_SECONDS", 0.3)
    interrupted(member("worker0", f"trap '' INT; touch {tmp_path}/ready0; {WAITS}"), after=tmp_path)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.received == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_is_ignored_stays_ignored() -> None:
    """Under nohup, a closed terminal must not end a job."""
    code = (
        "import os, signal\n"
        "from paceline.launch.interruption import Interruption\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with Interruption() as interruption:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print(interruption.received)\n"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"
