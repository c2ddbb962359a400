"""Membership as a sequence of views: who takes part in a job, from which step, with whose state.

A *view* has a number, its participants and the first step that they divide among them. One
coordinator announces views. Whatever changes the participants is a proposal to it: a connection
that has closed, a worker that asks to join. It then asks all participants for their positions
(`Change`). A participant stops at its next exchange and reports (`Position`); when all have, the
coordinator answers with the next view. If another participant fails meanwhile, the change starts
again under a higher number. Only participants of a view can fail.

After a failure the next view holds at once: the interrupted exchange is void, and its participants
make it again. A participant that had ended it gives its result to those that had not, and so each
exchange counts once, with the same result on all. A worker that joins takes part from the view's
first step on, which no participant has begun; one of them gives it the state of that step.

Inside a view the number of participants is fixed, so a machine that moves gradients never asks.
"""

import msgspec

from paceline.errors import ExchangeError
from paceline.protocol.actions import Action, Event, Lost, Send
from paceline.protocol.messages import Message

COORDINATOR = "coordinator"
"""The name of the member that announces views."""


class Enroll(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker asks to take part; `host` names where it runs."""

    worker: int
    host: str = ""


class Position(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A participant has stopped, has finished, or (`exchanges` of a joining worker no longer
    negative) has received the state."""

    worker: int
    view: int = 0
    """The number of the change that it answers."""

    exchanges: int = 0
    """Exchanges that have ended here. Negative: this worker has no state yet."""

    keeps: bool = True
    """It still has the result of its last exchange, for a participant that lacks it."""

    summed: int = 0
    """The number of workers whose values that result is made of."""

    weight: float = 1.0
    """What its part of the batch counts, an equal part being 1."""

    samples: int = 0
    """Samples of its part."""

    step: int = 0
    next_step: int = 0
    """The first step whose batch it has not begun."""

    entry_step: int = 0
    """The first step with which a joining worker could begin."""

    is_done: bool = False
    """It has nothing left to do, and stays for those that may need its last result."""

    leaves: bool = False
    """It is done, and the others may have more to do, which they do without it."""


class GiveUp(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker ends because of an error that concerns all of them."""

    worker: int
    why: str


class Change(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The coordinator asks for positions: the view with this number comes next."""

    view: int
    failed: tuple[int, ...] = ()
    """Participants that have failed or left. Without any, an exchange under way ends as usual."""


class View(Message, frozen=True, array_like=True, tag=True):
    """The coordinator announces who takes part."""

    number: int
    participants: tuple[int, ...]
    hosts: tuple[str, ...]
    """The host of each participant."""

    redo: bool = False
    """The exchange under way is void, and these participants make it again."""

    failed: tuple[int, ...] = ()
    """Participants of the view before that failed while they had work to do."""

    left: tuple[int, ...] = ()
    """Participants of the view before that have left."""

    joined: tuple[int, ...] = ()
    first_step: int = 0
    """The first step whose batch these participants divide among them."""

    step: int = 0
    """The step that was interrupted."""

    source: int = 0
    """The participant that gives the result of its last exchange, or the state."""

    behind: tuple[int, ...] = ()
    """Participants that lack the result of the last exchange."""

    summed: int = 0
    """The number of workers whose values that result is made of."""

    done: tuple[int, ...] = ()
    """Participants with nothing left to do."""

    unseen: int = 0
    """Samples of failed participants in the interrupted step."""


class End(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The job is over for the worker that receives this."""

    why: str = ""
    """The reason that it cannot continue; empty if it ended well."""

    failed: tuple[int, ...] = ()
    """Participants that failed since the newest view while they had work to do."""


class Participant:
    """One worker's side: it knows the newest view, and reports once it has stopped."""

    def __init__(self, worker: int, host: str = "") -> None:
        self.worker = worker
        self.view: View | None = None
        """The newest view; None before the first."""
        self.change: Change | None = None
        """What the coordinator has asked and not answered by a view."""
        self.end: End | None = None
        self._host = host
        self._position: Position | None = None

    @property
    def must_stop(self) -> bool:
        """A participant has failed: an exchange under way cannot end."""
        change = self.change  # another thread may take the next view meanwhile
        return change is not None and bool(change.failed)

    @property
    def has_reported(self) -> bool:
        """This worker waits for the next view."""
        return self._position is not None

    def enroll(self) -> list[Action]:
        return [Send(COORDINATOR, Enroll(self.worker, self._host))]

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Change():
                self.change = event
                self._forget_position()
                return self._report()
            case View():
                self.view, self.change = event, None
                self._forget_position()
                return []
            case End():
                self.end = self.end or event
                return []
            case Position():
                self._position = event
                return self._report()
            case GiveUp():
                return [Send(COORDINATOR, event)]
            case Lost():
                self.end = self.end or End(
                    f"worker{self.worker} has lost the connection to the job's coordinator."
                )
                return []
        raise ExchangeError(f"a participant cannot handle {event!r}.")

    def confirm(self, exchanges: int) -> list[Action]:
        """This worker has joined, and now has the state after so many exchanges."""
        return [Send(COORDINATOR, Position(self.worker, exchanges=exchanges))]

    def _forget_position(self) -> None:
        """A position is of the change that it answers, but nothing follows the last one."""
        if self._position is not None and not self._position.is_done:
            self._position = None

    def _report(self) -> list[Action]:
        """Answer a change if this worker has stopped; say that it is done."""
        own = self._position
        if own is None or (self.change is None and not own.is_done):
            return []
        number = 0 if self.change is None else self.change.view
        return [Send(COORDINATOR, msgspec.structs.replace(own, view=number))]
