"""One worker's connection to the coordinator: which view holds, and where this worker stands.

A thread that sleeps otherwise listens to the coordinator. A process that ends closes its
connection, however it ends; the coordinator notices that in milliseconds and asks all participants
for their positions. The training thread reports where it stops: inside an exchange that cannot end,
between two steps, or at its end. What follows is decided in `protocol/views.py`.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.errors import DeadlineError, ExchangeError, PacelineError
from paceline.launch import Identity
from paceline.launch.coordinator import NOTE
from paceline.protocol.actions import Action, Event, Lost, Send
from paceline.protocol.messages import Message
from paceline.protocol.views import COORDINATOR, Change, End, GiveUp, Participant, Position, View
from paceline.wire import Closed, JobKey, Mailbox, Packet

IDLE_SECONDS = 5.0
NOTICE_SECONDS = 10.0
"""An exchange has failed: so long its cause may take to be known here too."""

Kept = Callable[[], Sequence[Tensor] | None]
"""The result of the last exchange; None if it no longer exists."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a worker is in its training."""

    step: int = 0
    next_step: int = 0
    """The first whose batch it has not begun to train on."""

    samples: int = 0
    """How many it has trained on so far, those of the current step too."""

    weight: float = 1.0
    """What its part of the current batch counts, an equal one being 1."""


class ViewChanged(Exception):  # noqa: N818 - a turn of events
    """An exchange cannot end, because a participant of the view has failed."""


def _nothing() -> None:
    pass


class Views:
    """The views of one job, seen from one of its workers. Used by the training thread."""

    def __init__(self, identity: Identity, store: Store, *, deadline_seconds: float) -> None:
        """Ask the coordinator to take part, and wait for the first view; a worker that joins goes
        on until it needs the state (`join`)."""
        self.store = store
        self.exchanges = 0
        """Exchanges that have ended here."""
        self.changes = 0
        """How often the participants have changed: groups from before are void."""
        self.entry_every = 1
        """A worker can join at steps that this divides: between two rounds of averaging."""
        self.has_state = not identity.has_joined
        """False on a worker that joins, until another has given it the state."""
        self.kept: Kept = list
        self.summed = 0
        """The number of workers whose values the result of the last exchange is made of."""
        self.trained_samples = 0
        """How many samples this worker had trained on when its last exchange ended."""
        self.noticed_seconds = 0.0
        """When the first failure since the last view was noticed."""
        self._identity, self._deadline_seconds = identity, deadline_seconds
        self._machine = Participant(identity.rank, identity.host)
        self._changed = threading.Condition()
        self._views: deque[View] = deque()
        """Announced, and not yet taken by the training thread."""
        self._unsent: list[Action] = []
        self._closing = self._has_ended = False
        self._failure: PacelineError | None = None
        self.view = View(0, (identity.rank,), (identity.host,))
        self._enroll(store)
        self.members = self.view.participants

    def _forget(self) -> None:
        """Called in a process forked from this one (a loader's), which would keep the connection
        open when this one has ended."""
        self._mailbox.abandon()

    def _enroll(self, store: Store) -> None:
        try:
            endpoint = bytes(store.get(NOTE)).decode()
        except (DistError, RuntimeError) as error:
            problem = "the job's coordinator does not answer"
            raise ExchangeError(f"{problem}: {error}; start the job again.") from error
        identity = self._identity
        self._mailbox: Mailbox[Message] = Mailbox(
            identity.name,
            Change | View | End,
            JobKey(identity.key),
            encrypted=not endpoint.startswith("@"),  # between hosts
        )
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (forget() or _nothing)())
        self._mailbox.connect(COORDINATOR, endpoint)
        self._send(self._machine.enroll())
        self._thread = threading.Thread(target=self._watch, name="paceline-views", daemon=True)
        self._thread.start()
        if not self.has_state:
            return
        if not self._wait(lambda: bool(self._views)):
            self.close()
            raise DeadlineError("meeting the other workers", self._deadline_seconds, [])
        self.view = self._views.popleft()

    @property
    def must_stop(self) -> bool:
        """A participant has failed, and this worker has not taken the view that follows."""
        return self._machine.must_stop or self._is_redone() or self._failure is not None

    def _is_redone(self) -> bool:
        """The view after a failure has come, and the training thread has not taken it."""
        with self._changed:  # no other thread adds a view meanwhile
            return any(view.redo for view in self._views)

    def notices(self) -> bool:
        """Called when an exchange has failed: whether a failed participant is the reason."""
        return self._wait(lambda: self.must_stop, NOTICE_SECONDS)

    def next_view(self, progress: Progress) -> View:
        """Called inside an exchange that cannot end, or between two steps when a participant has
        failed: report, and return the view that follows; it holds from then on."""
        self._await(progress, self._is_redone)
        while not self._views[0].redo:  # a join that a failure has interrupted is void
            self._views.popleft()
        return self._enter(self._views.popleft())

    @property
    def is_asked(self) -> bool:
        """The coordinator waits for this worker's position."""
        return self._machine.change is not None and not self._machine.has_reported

    def report(self, progress: Progress) -> None:
        """Called while this worker waits inside an exchange: answer a change that interrupts
        none."""
        if self.is_asked and not self._machine.must_stop:
            self._report(progress)

    def between_steps(self, progress: Progress) -> View | None:
        """Called between two steps, until it returns None: the next view that holds from here on.

        This worker waits here while the participants change."""
        if self._machine.change is not None:
            self._await(progress, lambda: self._machine.change is None)
        while self._views:
            if self._is_redone():
                return self.next_view(progress)
            if self._views[0].joined:
                is_due = progress.step >= self._views[0].first_step
                return self._enter(self._views.popleft()) if is_due else None
            self._views.popleft()  # its change came to nothing
        return None

    def join(self) -> View:
        """Called by a worker that joins: the view with which it does; the state comes next."""
        progress, self.exchanges = Progress(), -1
        self._await(progress, lambda: bool(self._views) and self._machine.change is None)
        view = self._views[-1]
        self._views.clear()
        return self._enter(view)

    def confirm(self, exchanges: int) -> None:
        """This worker has the state after so many exchanges."""
        self.exchanges, self.has_state = exchanges, True
        with self._changed:
            self._unsent += self._machine.confirm(exchanges)
        self._wake()

    def _enter(self, view: View) -> View:
        self.members, self.view = view.participants, view
        self.changes += 1
        return view

    def finish(
        self, progress: Progress, serve: Callable[[View], None], *, leaves: bool = False
    ) -> tuple[int, ...]:
        """Called when this worker has nothing left to do; returns when no worker has, with those
        that failed since the newest view. `serve` is called with each view that comes meanwhile.
        One that `leaves` does not wait for the others."""
        self._report(progress, is_done=True, leaves=leaves)
        while True:
            # Others may still evaluate or save for as long as they like.
            self._wait(lambda: bool(self._views) or self._machine.end is not None, None)
            if not self._views:
                assert self._machine.end is not None
                return self._machine.end.failed
            view = self._views.popleft()
            if view.redo:
                with suppress(ViewChanged):
                    serve(self._enter(view))

    def close(self, why: str = "") -> None:
        """`why` this worker gives up, if that concerns the others too."""
        if why:
            self._tell(GiveUp(self._identity.rank, why))
        self._closing = True
        self._wake()
        self._thread.join(timeout=5.0)

    def _wake(self) -> None:
        """Have the listening thread look up, if it has not seen for itself that it is to end."""
        with self._changed:
            if not self._has_ended:
                self._mailbox.wake()

    def _report(self, progress: Progress, *, is_done: bool = False, leaves: bool = False) -> None:
        position = Position(
            self._identity.rank,
            exchanges=self.exchanges,
            keeps=self.kept() is not None,
            summed=self.summed,
            weight=progress.weight,
            samples=progress.samples - self.trained_samples,
            step=progress.step,
            next_step=progress.next_step,
            entry_step=-(-progress.next_step // self.entry_every) * self.entry_every,
            is_done=is_done,
            leaves=leaves,
        )
        self._tell(position)

    def _tell(self, event: Event | Message) -> None:
        """Tell the machine something that the training thread knows."""
        with self._changed:
            self._unsent += self._machine.handle(event)
        self._wake()

    def _await(self, progress: Progress, has_come: Callable[[], bool]) -> None:
        """Report to each change, for a further failure starts it again."""
        end = time.monotonic() + self._deadline_seconds
        while not has_come():
            if self.is_asked:
                self._report(progress)
            left = max(0.0, end - time.monotonic())
            if not self._wait(lambda: has_come() or self.is_asked, left):
                raise DeadlineError("agreeing on the next view", self._deadline_seconds, [])

    def _wait(self, done: Callable[[], bool], seconds: float | None = -1.0) -> bool:
        """Until `done`, or so many seconds (by default the deadline); whether it is."""
        seconds = self._deadline_seconds if seconds == -1.0 else seconds
        with self._changed:
            is_done = self._changed.wait_for(lambda: done() or self._failure is not None, seconds)
        if self._failure is not None:
            raise self._failure
        return is_done

    # The listening thread.

    def _watch(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._send_rest()
        except PacelineError as error:
            self._failure = error
        except OSError as error:
            self._failure = ExchangeError(f"the job's coordinator cannot be heard: {error}")
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._mailbox.close()

    def _turn(self) -> None:
        events = self._mailbox.receive(IDLE_SECONDS)
        with self._changed:
            for event in events:
                if isinstance(event, Closed):
                    self._handle(Lost(event.peer))
                    continue
                for message in event.messages:
                    self._handle(message)
            self._changed.notify_all()
        self._send_rest()

    def _handle(self, event: Message | Event) -> None:
        if isinstance(event, Change) and not self._machine.must_stop:
            self.noticed_seconds = time.monotonic()
        self._unsent += self._machine.handle(event)
        if isinstance(event, View):
            self._views.append(event)
        end = self._machine.end
        if end is not None and end.why and self._failure is None:
            self._failure = ExchangeError(end.why)

    def _send_rest(self) -> None:
        with self._changed:
            unsent, self._unsent = self._unsent, []
        self._send(unsent)

    def _send(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert isinstance(action, Send)
            self._mailbox.send(Packet(action.to, [action.message], for_server=True))
