"""Members' words on the launcher's streams: whole, in lines, named where they need it."""

import io
import sys

import pytest

from paceline.cli.streams import MemberStreams


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.fixture
def written(capsysbinary):
    """What was written to stdout and stderr."""
    return lambda: capsysbinary.readouterr()._asdict()


def test_worker_0_comes_as_it_is_and_others_with_their_names(written):
    say = MemberStreams()
    say("worker0", "stdout", b"a\tb [red]c[/red] \xff\n")
    say("worker1", "stdout", b"one\ntwo\n")
    say("worker1", "stderr", b"oh\n")
    say("worker0", "stdout", "ü".encode() * 100 + b"\n")
    assert written() == {
        "out": b"a\tb [red]c[/red] \xff\nworker1 | one\nworker1 | two\n"
        + "ü".encode() * 100
        + b"\n",
        "err": b"worker1 | oh\n",
    }


def test_nobody_writes_into_anothers_line(written):
    say = MemberStreams()
    say("worker0", "stdout", b"loading ...")
    say("worker1", "stdout", b"x")
    say("worker1", "stdout", b"y\n")
    say("worker0", "stdout", b" done\n")
    assert written()["out"] == b"loading ...\nworker1 | xy\n done\n"


def test_a_bar_is_kept_and_its_line_named_each_time(written):
    say = MemberStreams()
    say("worker1", "stderr", b"\r 10%")
    say("worker1", "stderr", b"\r 20%\r")
    say("worker1", "stderr", b"\n")
    say("worker1", "stderr", b"end\r\n")
    expected = b"\rworker1 |  10%\rworker1 |  20%\r\nworker1 | end\r\n"
    assert written()["err"] == expected


def test_stdout_can_be_kept_for_something_else(written):
    say = MemberStreams(stdout=False)
    say("worker0", "stdout", b"a")
    say("worker0", "stderr", b"b\n")
    assert written() == {"out": b"", "err": b"a\nb\n"}


def test_on_a_terminal_names_are_dim_and_a_bar_is_erased(monkeypatch):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", Terminal(file, encoding="utf-8"))
    say = MemberStreams(stdout=False)
    say("worker0", "stderr", b" 10%\r")
    say("worker1", "stderr", b"x\n")
    assert file.getvalue() == b" 10%\r\x1b[K\x1b[2mworker1 | \x1b[0mx\n"
