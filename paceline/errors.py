"""Every exception Paceline raises on purpose.

PacelineError
├── UserError               what the user asked for cannot be done; exit status 2, nothing written
│   ├── SpecError           a value in an experiment file or a flag: where, problem, fix
│   └── MissingError        something the machine lacks: a package, a file, a right
├── MemberError             a member ended badly; carries its name, exit status and last words
├── DeadlineError           a wait ran out; names the operation and who is missing
├── ExchangeError           members disagree or a message makes no sense; a bug or a stranger
└── RecordError             a run folder cannot be read
"""

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all of ours; the command line shows it as one message, without a traceback."""

    exit_status = 1


class UserError(PacelineError):
    """The request itself is at fault, and the message says how to mend it."""

    exit_status = 2


class SpecError(UserError):
    """A value the user wrote: where it stands, what is wrong with it, what to write instead."""

    def __init__(self, where: str, problem: str, fix: str) -> None:
        self.where, self.problem, self.fix = where, problem, fix
        super().__init__(f"{where}: {problem}\n  fix: {fix}")

    def __reduce__(self) -> tuple[type["SpecError"], tuple[str, str, str]]:
        return type(self), (self.where, self.problem, self.fix)


class MissingError(UserError):
    """The machine lacks something; `fix` is the command or the place that provides it."""

    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix
        super().__init__(f"{problem}\n  fix: {fix}")

    def __reduce__(self) -> tuple[type["MissingError"], tuple[str, str]]:
        return type(self), (self.problem, self.fix)


class MemberError(PacelineError):
    """A member ended with a failure; the first to fail is the one shown."""

    def __init__(self, member: str, exit_status: int, last_lines: list[str]) -> None:
        self.member, self.member_status, self.last_lines = member, exit_status, last_lines
        if exit_status == 2:  # the member met a UserError: the fault is the user's there too
            self.exit_status = 2
        how = f"was ended by signal {-exit_status}" if exit_status < 0 else f"exited {exit_status}"
        said = "".join(f"\n  {line}" for line in last_lines) or "\n  (it printed nothing)"
        super().__init__(f"{member} {how}; its last words:{said}")


class DeadlineError(PacelineError):
    """A wait ran out of time."""

    def __init__(self, operation: str, seconds: float, missing: Iterable[str]) -> None:
        self.operation, self.seconds, self.missing = operation, seconds, sorted(missing)
        names = ", ".join(self.missing) or "unknown"
        super().__init__(f"{operation}: no answer within {seconds:g} s; missing: {names}")


class ExchangeError(PacelineError):
    """Members disagree about the exchange, or a message makes no sense."""


class RecordError(PacelineError):
    """A run folder cannot be read."""


def suggest(given: str, known: Iterable[str]) -> str:
    """Return the fix for a misspelt name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    listed = ", ".join(names)
    return f'did you mean "{close[0]}"? Known: {listed}.' if close else f"one of: {listed}."
