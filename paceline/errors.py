"""Every exception Paceline raises on purpose.

PacelineError
├── UserError               what the user asked for cannot be done; exit status 2, nothing written
│   ├── SpecError           a value in an experiment file or a flag: where, problem, fix
│   └── MissingError        something the machine lacks: a package, a file, a right
├── MemberError             a member ended badly; carries its name, exit status and last words
├── DeadlineError           a wait ran out; names the operation and who is missing
├── FaultError              a fault that was asked for did not happen; the drill shows nothing
├── ExchangeError           members disagree or a message makes no sense; a bug or a stranger
└── RecordError             a run folder cannot be read or written

KeyboardInterrupt
└── Interrupted             somebody asked the launcher to end; not an error of the run

SystemExit
└── JobOver                 the job that this worker joined is over: so is its own part
"""

import difflib
import signal
import sys
from collections.abc import Iterable, Mapping


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

    def __init__(
        self,
        member: str,
        exit_status: int,
        last_lines: list[str],
        *,
        sentence: str = "",
        without: str = "",
        beside: Mapping[str, int] | None = None,
    ) -> None:
        """`sentence`: a PacelineError it ended with; `without`: who had ended and was needed;
        `beside`: others that a signal ended, and their statuses."""
        self.member, self.member_status, self.last_lines = member, exit_status, last_lines
        # As a shell has it: a script's own status is passed on, a signal's is told from it.
        self.exit_status = 128 - exit_status if exit_status < 0 else exit_status or 1
        self.brief = f"{member} {_how(exit_status)}"
        if without:
            self.brief = f"{without} had ended, and {member} could not go on without it"
            self.brief += f" ({_how(exit_status)})"
        others = "".join(f"; {name} {_how(status)}" for name, status in (beside or {}).items())
        whose = f"the last words of {member}" if others else "its last words"
        self.brief += others
        said = "".join(f"\n  {line}" for line in last_lines) or "\n  (it printed nothing)"
        words = f"{self.brief}; {whose}:{said}"
        if sentence:
            words = f"{self.brief}: {sentence}" if without else f"{member}: {sentence}"
        self.is_sentence = bool(sentence)
        super().__init__(words)


class DeadlineError(PacelineError):
    """A wait ran out of time."""

    def __init__(self, operation: str, seconds: float, missing: Iterable[str]) -> None:
        self.operation, self.seconds, self.missing = operation, seconds, sorted(missing)
        names = ", ".join(self.missing) or "unknown"
        super().__init__(f"{operation}: no answer within {seconds:g} s; missing: {names}")


class FaultError(PacelineError):
    """A fault that was asked for did not happen."""


class ExchangeError(PacelineError):
    """Members disagree about the exchange, or a message makes no sense."""


class RecordError(PacelineError):
    """A run folder cannot be read or written."""


class Interrupted(KeyboardInterrupt):
    """Somebody asked the launcher to end, by Ctrl-C or a signal; every member was ended.

    No Exception, so that nothing which goes on after a failed run goes on after this one.
    """

    def __init__(self, number: int) -> None:
        self.exit_status = 128 + number
        self.kept = ""
        """Where what was recorded lies; empty when nothing may have been."""

        name = signal.Signals(number).name
        self.brief = "interrupted by Ctrl-C" if name == "SIGINT" else f"ended by {name}"
        super().__init__(number)

    def __str__(self) -> str:
        return f"{self.brief}; what was recorded is in {self.kept}." if self.kept else self.brief


class JobOver(SystemExit):
    """The others have finished; one who joined them has done its part and ends, with status 0.

    No Exception: a script that counts its steps by itself, and would go on, must not have to know.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = 0

    def told(self) -> "JobOver":
        """Itself, once it is said why: Python ends without a word."""
        print(f"paceline: {self.args[0]}", file=sys.stderr, flush=True)
        return self


def _how(exit_status: int) -> str:
    if exit_status >= 0:
        return f"exited {exit_status}"
    known = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"was ended by signal {-exit_status}{known.get(-exit_status, '')}"


def suggest(given: str, known: Iterable[str]) -> str:
    """Return the fix for a misspelt name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    listed = ", ".join(names)
    return f'did you mean "{close[0]}"? Known: {listed}.' if close else f"one of: {listed}."
