"""Every option of every verb with values it cannot mean: one sentence, exit 2, nothing written."""

import time
from pathlib import Path

import pytest

from paceline.cli import main
from tests.cli.bad_values import Case, argument_cases, cases, surroundings
from tests.support.synthetic import synchronous_run


class ReachedError(BaseException):
    """The input was taken, and the work would begin."""


@pytest.fixture
def nothing_begins(monkeypatch):
    """Verbs stop where the work would begin."""

    def reach(*_, **__):
        raise ReachedError

    for place in (
        "paceline.engines.run",
        "paceline.search.running.Searching.run",
        "paceline.cli.tables.run",
        "paceline.diagnose.doctor.examine",
        "paceline.compute.profiling.profile",
        "paceline.tunnel.agents.local_pairs",
        "paceline.tunnel.agents.tunnel_pairs",
        "paceline.tunnel.netpipe.serve",
        "paceline.tunnel.netpipe.wait_for",
        "paceline.report.live.serve",
        "paceline.report.write_runs",
        "paceline.builtin.member.train_here",
        "paceline.predict.clock.Clock.run",
        "os.execv",
    ):
        monkeypatch.setattr(place, reach)
    monkeypatch.setattr(time, "sleep", reach)
    monkeypatch.setenv("PACELINE_KEY", "k")


def outcome(case: Case, capsys) -> tuple[object, str, str]:
    try:
        with pytest.raises(SystemExit) as stop:
            main.main(case.line)
    except ReachedError:
        return "taken", *capsys.readouterr()
    return stop.value.code, *capsys.readouterr()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def judge(case: Case, folder: Path, capsys) -> str:
    """What is wrong with how a verb took it; empty when nothing is."""
    before = files(folder)
    try:
        status, out, err = outcome(case, capsys)
    except Exception as error:
        return f"{case}: a traceback, {type(error).__name__}: {str(error)[:100]}"
    if case.is_taken:
        return "" if status in ("taken", 0) else f"{case}: refused, {err[:200]}"
    if status != 2:
        return f"{case}: {'taken' if status in ('taken', 0) else f'status {status}'}"
    if "error: " not in err or "fix: " not in err or "Traceback" in err or out:
        return f"{case}: not one sentence and a fix, {err[:200]!r} {out[:50]!r}"
    written = files(folder) - before
    return f"{case}: left {sorted(written)[:3]}" if written else ""


def verbs() -> dict[str, list[Case]]:
    table: dict[str, list[Case]] = {}
    for case in (c for c in (*cases(), *argument_cases()) if not c.takes_long):
        table.setdefault(case.verb, []).append(case)
    return table


TABLE = verbs()


@pytest.mark.parametrize("verb", TABLE)
def test_values_that_make_no_sense(verb, in_empty_folder, nothing_begins, capsys):
    surroundings(in_empty_folder)
    synchronous_run(in_empty_folder / "run", steps=12)
    wrong = [text for case in TABLE[verb] if (text := judge(case, in_empty_folder, capsys))]
    assert not wrong, "\n".join(wrong)


def test_the_table_is_large():
    assert sum(map(len, TABLE.values())) > 600
    assert set(TABLE) == set(main.VERBS)
