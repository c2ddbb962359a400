"""The workers of a job that goes on without those who are lost: who is there, and where all stand.

Every worker has a connection to every other one, watched by a thread that sleeps otherwise. A
process that ends closes its connections, however it ends; that is how it is noticed, in
milliseconds, with or without a launcher. What follows is decided by `protocol/regrouping.py`; the
training thread asks for it inside an exchange that cannot end.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistNetworkError

from paceline.errors import DeadlineError, ExchangeError, PacelineError
from paceline.launch import Identity
from paceline.protocol.actions import Event, Lost, Send
from paceline.protocol.messages import Message
from paceline.protocol.placement import worker_of
from paceline.protocol.regrouping import (
    Done,
    GaveUp,
    GiveUp,
    Heard,
    Here,
    Over,
    Refuse,
    Regroup,
    RegroupMachine,
    Report,
    Stopped,
)
from paceline.wire import JobKey, StreamMailbox

IDLE_SECONDS = 5.0
NOTICE_SECONDS = 10.0
"""An exchange has failed: so long its cause may take to be seen here too."""

Kept = Callable[[], Sequence[Tensor] | None]
"""What the last exchange came to; None where it is no longer there."""


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


class MemberLost(Exception):  # noqa: N818 - a turn of events
    """An exchange cannot end, because a worker is lost that takes part in it."""


@contextmanager
def _told_apart(member: str, seconds: float) -> Iterator[None]:
    """A store that is gone, and a member that does not come."""
    try:
        yield
    except DistNetworkError as error:
        problem = "worker0 was lost before all workers had met"
        raise ExchangeError(f"{problem}; start the job again.") from error
    except (DistError, RuntimeError) as error:
        raise DeadlineError("meeting the other workers", seconds, [member]) from error


def _nothing() -> None:
    pass


class Crew:
    """One worker's connections to the others. Used by the training thread."""

    def __init__(
        self,
        identity: Identity,
        store: Store,
        *,
        deadline_seconds: float,
        keep_store: Callable[[], str] = lambda: "",
        follow_store: Callable[[str], None] = lambda address: None,
    ) -> None:
        """Meet all others. `keep_store` opens a store here and says where, `follow_store` goes to
        another's: worker 0 keeps the first one, and may be lost."""
        self.turn = self.regroupings = 0
        """Exchanges that have ended here, and how often the workers have regrouped."""
        self.kept: Kept = list
        self.summed = 0
        """Of how many workers' values that is the sum."""
        self.trained_samples = 0
        """How many this worker had trained on when its last exchange ended."""
        self.store = store
        self.noticed_seconds = 0.0
        """When the first loss since the last regrouping was noticed."""
        self._identity, self._deadline_seconds = identity, deadline_seconds
        self._keep_store, self._follow_store = keep_store, follow_store
        self._machine = RegroupMachine(identity.rank, range(identity.workers))
        self.members = self._machine.members
        self._changed = threading.Condition()
        self._inbox: deque[Event] = deque()
        self._heard = {identity.rank}
        self._regroup: Regroup | None = None
        self._is_over = self._closing = self._has_ended = False
        self._failure: PacelineError | None = None
        self._mailbox: StreamMailbox[Message] = StreamMailbox(
            identity.name, Here | Report | Done | GaveUp, JobKey(identity.key)
        )
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (forget() or _nothing)())
        self._meet()

    def _forget(self) -> None:
        """Called in a process forked from this one (a loader's), which would keep the connections
        open when this one has ended."""
        self._mailbox.abandon()

    def _meet(self) -> None:
        """Each calls those before it, and is called by those behind it."""
        identity = self._identity
        where = self._mailbox.bind("" if identity.on_one_host else identity.address)
        with _told_apart("worker0", self._deadline_seconds):
            self.store.set(f"crew/{identity.rank}", where)
        for rank in range(identity.rank):
            self._mailbox.connect(f"worker{rank}", self._address_of(rank))
            self._mailbox.send(f"worker{rank}", [Here(identity.rank)])
        self._thread = threading.Thread(target=self._watch, name="paceline-crew", daemon=True)
        self._thread.start()
        everybody = set(range(identity.workers))
        if not self._wait(lambda: self._heard | self._machine.lost >= everybody):
            self.close()
            missing = [f"worker{rank}" for rank in everybody - self._heard]
            raise DeadlineError("meeting the other workers", self._deadline_seconds, missing)

    def _address_of(self, rank: int) -> str:
        with _told_apart(f"worker{rank}", self._deadline_seconds):
            return bytes(self.store.get(f"crew/{rank}")).decode()

    @property
    def is_short(self) -> bool:
        """Somebody is lost, and this worker has not regrouped with the others since."""
        return bool(self._machine.lost) or self._regroup is not None or self._failure is not None

    def notices(self) -> bool:
        """Called when an exchange has failed: whether a loss is why."""
        return self._wait(lambda: self.is_short, NOTICE_SECONDS)

    def regroup(self, progress: Progress) -> Regroup:
        """Called inside an exchange when somebody is lost: agree with all who are left.

        From then on `members` are those. Raises where they cannot go on.
        """
        self._stop(progress, is_done=False)
        if not self._wait(lambda: self._regroup is not None):
            missing = [f"worker{rank}" for rank in self._machine.missing]
            raise DeadlineError("regrouping after a loss", self._deadline_seconds, missing)
        return self._take()

    def finish(self, progress: Progress, serve: Callable[[Regroup], None]) -> tuple[int, ...]:
        """Called when this worker has nothing left to do; returns when nobody has, with those that
        were lost since the last regrouping. `serve` is called with each that comes meanwhile."""
        self._stop(progress, is_done=True)
        while True:
            # Others may still evaluate or save for as long as they like.
            self._wait(lambda: self._regroup is not None or self._is_over, None)
            if self._regroup is None:
                return tuple(sorted(self._machine.lost_at_work))
            with contextlib.suppress(MemberLost):
                serve(self._take())

    def close(self, why: str = "") -> None:
        """`why` this worker gives up, where that is the others' affair, too."""
        if why:
            self._inbox.append(GiveUp(why))
        self._closing = True
        self._wake()
        self._thread.join(timeout=5.0)

    def _wake(self) -> None:
        """Have the watching thread look up, if it has not seen for itself that it is to end."""
        with self._changed:
            if not self._has_ended:
                self._mailbox.wake()

    def _stop(self, progress: Progress, *, is_done: bool) -> None:
        stopped = Stopped(
            self.turn,
            self.kept() is not None,
            self.summed,
            progress.weight,
            progress.samples - self.trained_samples,
            progress.step,
            progress.next_step,
            self._keep_store(),
            is_done,
        )
        self._inbox.append(stopped)
        self._wake()

    def _take(self) -> Regroup:
        regroup, self._regroup = self._regroup, None
        assert regroup is not None
        if regroup.refusal:
            names = " and ".join(f"worker{rank}" for rank in regroup.lost)
            problem = f"{names} was lost in step {regroup.step}"
            raise ExchangeError(f"{problem}, and the others cannot go on: {regroup.refusal}.")
        if regroup.members[0] != self.members[0]:
            self._go_to(regroup.store)
        self.members = regroup.members
        self.regroupings += 1
        return regroup

    def _go_to(self, store: str) -> None:
        """Whoever keeps it has opened it, and may be lost by now."""
        try:
            self._follow_store(store)
        except (OSError, PacelineError) as error:
            if self.is_short:
                raise MemberLost from error
            raise

    def _wait(self, done: Callable[[], bool], seconds: float | None = -1.0) -> bool:
        """Until `done`, or so many seconds (by default the deadline); whether it is."""
        seconds = self._deadline_seconds if seconds == -1.0 else seconds
        with self._changed:
            is_done = self._changed.wait_for(lambda: done() or self._failure is not None, seconds)
        if self._failure is not None:
            raise self._failure
        return is_done

    # The watching thread.

    def _watch(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._take_told()
        except PacelineError as error:
            self._failure = error
        except OSError as error:
            self._failure = ExchangeError(f"the other workers cannot be watched: {error}")
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._mailbox.close()

    def _turn(self) -> None:
        """Take what came from others and from the training thread, in the order it came."""
        for packet in self._mailbox.receive(IDLE_SECONDS):
            for message in packet.messages:
                self._handle(message)
        while self._mailbox.lost:
            self._handle(Lost(self._mailbox.lost.popleft()))
        self._take_told()
        with self._changed:
            self._changed.notify_all()

    def _take_told(self) -> None:
        while self._inbox:
            self._handle(self._inbox.popleft())

    def _handle(self, event: Message | Event) -> None:
        if isinstance(event, Lost | Report) and not self._machine.lost:
            self.noticed_seconds = time.monotonic()
        for action in self._machine.handle(event):
            match action:
                case Send():
                    self._say(action.to, action.message)
                case Heard():
                    self._heard.add(action.worker)
                case Regroup():
                    self._regroup = action
                case Over():
                    self._is_over = True
                case Refuse():
                    self._failure = self._failure or ExchangeError(action.why)

    def _say(self, member: str, message: Message) -> None:
        called_us = (worker_of(member) or 0) > self._identity.rank
        (self._mailbox.reply if called_us else self._mailbox.send)(member, [message])
