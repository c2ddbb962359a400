"""Who is named when several members failed, and with which words."""

import signal

import pytest

from paceline.launch.last_words import (
    ECHO_SECONDS,
    LastWords,
    ending,
    first_cause,
    is_settled,
    sentence,
)

TRACEBACK = "Traceback (most recent call last):\n  File ..., line 1\n"
GLOO = f"{TRACEBACK}RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:3210\n"
WAITED = f"{TRACEBACK}paceline.errors.DeadlineError: step 3: no answer within 120 s; missing: x\n"
LOST = f"{TRACEBACK}paceline.errors.ExchangeError: worker1 was lost in step 3, and it is over.\n"
UNKNOWN = WAITED.replace("missing: x", "missing: unknown")
STORE_GONE = f"{TRACEBACK}DistNetworkError: the job's store is gone: it has closed the connection\n"
STORE_LOST = (
    "error: server0 lost the job's store before it could read the note plan: worker0 has ended.\n"
)
OWN = f"{TRACEBACK}ValueError: my own mistake\n"
REFUSED = f"{TRACEBACK}paceline.errors.SpecError: ring: it cannot.\n  fix: do not.\n"


def ended(name, status, said, *, said_at, ended_at=None):
    words = LastWords()
    words.add("stderr", said.encode(), said_at)
    return ending(name, status, said_at if ended_at is None else ended_at, words)


@pytest.mark.parametrize(
    ("endings", "named"),
    [
        # the cause says its words first and takes longer to leave
        ([("worker0", 1, OWN, 1.0, 3.0), ("worker1", 1, GLOO, 1.5, 1.6)], "worker0"),
        ([("worker0", 1, GLOO, 1.0, 1.0), ("worker1", 1, OWN, 1.5, 1.6)], "worker1"),
        ([("worker0", 1, WAITED, 1.0, 1.0), ("server0", 1, OWN, 2.0, 2.0)], "server0"),
        ([("worker0", 1, REFUSED, 1.0, 2.0), ("worker1", 1, WAITED, 1.2, 1.2)], "worker0"),
        ([("server0", 1, LOST, 1.0, 1.0), ("worker1", -9, "", 1.2, 1.2)], "worker1"),
        # killed from outside, in the same moment as another's error
        ([("worker0", 1, OWN, 1.0, 1.0), ("worker1", -9, "", 1.0, 1.0)], "worker1"),
        # C++ ends a survivor by a signal, too
        ([("worker0", -6, f"terminate called\n{GLOO}", 1.0, 1.0), ("worker1", 1, OWN, 1.1, 1.2)],
         "worker1"),
        # a stopped worker: who waited for it says so, and its peers lose that one in turn
        ([("worker0", 1, WAITED, 1.0, 1.5), ("server0", 1, STORE_GONE, 1.2, 1.3)], "worker0"),
        ([("worker0", 1, WAITED, 1.2, 1.5), ("worker2", 1, GLOO, 1.0, 1.0)], "worker0"),
        ([("worker0", 1, UNKNOWN, 1.2, 1.5), ("worker2", 1, GLOO, 1.0, 1.0)], "worker2"),
        ([("server0", 1, STORE_GONE, 1.0, 1.0), ("worker0", 1, OWN, 1.2, 1.3)], "worker0"),
        ([("server0", 1, STORE_LOST, 1.0, 1.0), ("worker0", 1, OWN, 1.2, 1.3)], "worker0"),
        ([("worker0", 3, "", 2.0, 2.0), ("worker1", 1, OWN, 2.1, 2.1)], "worker0"),
    ],
)  # fmt: skip
def test_the_cause_is_named_and_not_its_echo(endings, named):
    found = [ended(n, s, text, said_at=a, ended_at=b) for n, s, text, a, b in endings]
    for order in (found, found[::-1]):
        assert first_cause(order, {}).member == named


def test_all_that_signals_ended_are_named_and_nobody_who_only_lost_them():
    one = ended("worker2", -9, "", said_at=1.0)
    other = ended("server0", -15, "", said_at=1.05)
    echo = ended("worker0", -6, f"terminate called\n{GLOO}", said_at=1.1)
    for order in ([one, other, echo], [echo, other, one]):
        error = first_cause(order, {})
        told = "worker2 was ended by signal 9 (SIGKILL); server0 was ended by signal 15 (SIGTERM)"
        assert error.brief == told
        assert str(error).startswith(f"{told}; the last words of worker2:")
    assert first_cause([one, echo], {}).brief == "worker2 was ended by signal 9 (SIGKILL)"
    own = ended("worker1", 1, OWN, said_at=0.5)
    assert "server0" not in first_cause([own, other], {}).brief, "what it met may be its end"


def test_the_end_of_a_job_that_waited_for_a_stopped_worker_names_it():
    waited = ended("worker0", 1, WAITED.replace("missing: x", "missing: worker1"), said_at=1.0)
    server = ended("server0", 1, STORE_GONE, said_at=1.1)
    told = "worker0: step 3: no answer within 120 s; missing: worker1"
    assert str(first_cause([server, waited], {})) == told


def test_a_sentence_of_ours_is_the_whole_message():
    error = first_cause([ended("worker0", 1, REFUSED, said_at=1.0)], {})
    assert str(error) == "worker0: ring: it cannot.\n  fix: do not."
    assert sentence(["error: no.", "  fix: yes.", "Exception ignored in: x"]) == "no.\n  fix: yes."
    assert sentence(OWN.splitlines()) == ""
    ranked = "".join(f"[rank3]: {line}\n" for line in REFUSED.splitlines())  # torch's excepthook
    assert str(first_cause([ended("worker0", 1, ranked, said_at=1.0)], {})) == str(error)


def test_words_printed_long_before_are_no_echo():
    words = LastWords()
    words.add("stderr", b"warning: Connection reset by peer, trying again\n", 0.0)
    words.add("stderr", OWN.encode(), 5.0)
    assert not ending("worker0", 1, 5.1, words).is_echo


def test_those_who_left_before_are_told_where_there_is_no_other_cause():
    lost = ended("worker1", 1, GLOO, said_at=4.0)
    told = "worker0 had ended, and worker1 could not go on without it (exited 1)"
    assert str(first_cause([lost], {"worker0": 2.0})).startswith(told)
    assert "had ended" not in str(first_cause([lost], {"worker0": 9.0}))
    own = ended("worker1", 1, OWN, said_at=4.0)
    assert "had ended" not in str(first_cause([own], {"worker0": 2.0}))


def test_echoes_alone_are_not_believed_at_once():
    echo, own = ended("a", 1, GLOO, said_at=1.0), ended("b", 1, OWN, said_at=1.0)
    assert not is_settled([echo], 1, 1.0)
    assert is_settled([echo], 1, ECHO_SECONDS)
    assert is_settled([echo], 0, 0.0), "nobody is left to be the cause"
    assert is_settled([echo, own], 1, 0.5)


@pytest.mark.parametrize(
    ("status", "passed_on"), [(3, 3), (2, 2), (1, 1), (-signal.SIGSEGV, 139), (-9, 137)]
)
def test_a_members_exit_status_is_the_launchers(status, passed_on):
    assert first_cause([ended("worker0", status, "", said_at=1.0)], {}).exit_status == passed_on


def test_the_last_state_of_a_bar_is_a_line():
    words = LastWords()
    words.add("stderr", b" 10%\r 20%\r 30%\nno end", 1.0)
    words.end(2.0)
    assert words.lines == [" 30%", "no end"]
