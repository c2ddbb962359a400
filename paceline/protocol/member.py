"""Where the machines of servers and their workers meet the world: it carries out what they decide.

What goes into one packet, and how long a seat works before it looks up, is decided here for all
worlds alike; nothing else is.

A `Member` has a worker's machine, a seat's, or both. The world tells it what happened (`tell`,
`receive`, `finished`); it asks the machines, and has the world do what they want through the four
methods of `World`. There are three worlds: real (sockets, memory, torch), the predictor's virtual
clock, and a test's network.
"""

from collections.abc import Sequence
from typing import Protocol

from paceline.errors import ExchangeError
from paceline.protocol.actions import Action, Event, Lost, Send, Work
from paceline.protocol.messages import Message
from paceline.protocol.placement import worker_of
from paceline.protocol.plan import GATHER_SECONDS, TURN_SECONDS
from paceline.protocol.seat import SeatMachine


class Machine(Protocol):
    """The worker's side of any architecture."""

    @property
    def present_step(self) -> int:
        """The step whose answers it waits for, or else the next."""

    def handle(self, event: Message | Event) -> list[Action]:
        """Called with what happened; returns what is to be done about it, in order."""


class World(Protocol):
    """How a member's actions are carried out."""

    def now(self) -> float:
        """Seconds on this world's clock."""

    def moves(self, send: Send) -> int:
        """Called before something is sent: the bytes of payload that have to travel for it.

        None where members share memory, or a push has no gradient: such messages may wait for
        others to the same member."""

    def post(self, to: str, sends: Sequence[Send]) -> None:
        """Called with all that goes to another member in one packet, which is told to `receive` it
        later. Where a push has payload that travels, this member is told `Departed` when the
        network has taken it."""

    def do(self, action: Action) -> None:
        """Called with everything else, in order. For `Work` the member is told `finished`, inside
        this call or later."""


class Member:
    """One member's machines at work in one world."""

    def __init__(
        self, name: str, world: World, worker: Machine | None, seat: SeatMachine | None
    ) -> None:
        self.name, self.worker, self.seat = name, worker, seat
        self._world = world
        self._busy: Work | None = None
        self._answers: dict[str, list[Send]] = {}
        """What the seat has gathered for others."""
        self._gathered_since = 0.0

    def tell(self, *events: Event) -> None:
        """Something happened to the worker's side; what it sends for all of it goes together."""
        self._act_for_worker(*events)

    def receive(self, message: Message, *, for_seat: bool) -> None:
        """A message has come; `do(Keep)` and `do(Usable)` find its payload where the world put it.

        After it, or several, call `work`."""
        if for_seat:
            self._act_for_seat(message)
        else:
            self._act_for_worker(message)

    def lose(self, member: str) -> None:
        """A connection has closed: both sides hear of it."""
        ended = False
        if self.seat is not None:
            worker = worker_of(member)
            ended = worker is not None and self.seat.roster.has_ended(worker)
            beside = None if self.worker is None else self.worker.present_step
            self._act_for_seat(Lost(member, step=beside))
        if self.worker is not None:
            self._act_for_worker(Lost(member, ended))

    def work(self) -> bool:
        """Do the most urgent work for `TURN_SECONDS`; what has come meanwhile may be more urgent.

        True when none is left. One thing is under way at a time; a world that finishes it later
        calls this again then.
        """
        seat = self.seat
        if seat is None:
            return True
        until = self._world.now() + TURN_SECONDS if seat.has_work else 0.0
        while self._busy is None and (work := seat.take()) is not None:
            self._busy = work
            self._world.do(work)
            if not seat.has_work:
                break
            now = self._world.now()
            if self._answers and now - self._gathered_since > GATHER_SECONDS:
                self._flush()
            if now > until:
                break
        is_done = not seat.has_work
        if is_done and self._busy is None and self._answers:
            self._flush()
        return is_done

    def finished(self, work: Work, squared_norms: Sequence[float] = ()) -> None:
        """The world has done some work (`measure`: with the squared norm of each parameter)."""
        assert self.seat is not None
        assert work is self._busy
        self._busy = None
        self._answer(self.seat.done(work, squared_norms))

    def _act_for_seat(self, event: Message | Event) -> None:
        if self.seat is None:
            return  # a stranger's mistake; the wire counts it
        try:
            actions = self.seat.handle(event)
        except ExchangeError as error:
            self._stop(self.seat, str(error))
            raise
        self._answer(actions)

    def _stop(self, seat: SeatMachine, reason: str) -> None:
        """Before the connections close; the worker in this process hears of it by the error."""
        self._flush()
        for send in seat.stop(reason):
            if send.to != self.name:
                self._world.post(send.to, [send])

    def _answer(self, actions: Sequence[Action]) -> None:
        """What moves no payload is gathered until the seat has no work, for `GATHER_SECONDS`."""
        for action in actions:
            if not isinstance(action, Send):
                self._world.do(action)
            elif action.to == self.name:
                self._act_for_worker(action.message)
            elif self._world.moves(action):
                self._flush()  # announcements keep their place before the answer
                self._world.post(action.to, [action])
            else:
                if not self._answers:
                    self._gathered_since = self._world.now()
                self._answers.setdefault(action.to, []).append(action)

    def _act_for_worker(self, *events: Message | Event) -> None:
        """What moves no payload goes in one packet for each member, before what follows it."""
        worker = self.worker
        if worker is None:
            return
        world, gathered = self._world, dict[str, list[Send]]()
        for event in events:
            for action in worker.handle(event):
                if not isinstance(action, Send):
                    world.do(action)
                elif action.to == self.name:
                    self._act_for_seat(action.message)
                elif world.moves(action):
                    if action.to in gathered:
                        world.post(action.to, gathered.pop(action.to))
                    world.post(action.to, [action])
                else:
                    gathered.setdefault(action.to, []).append(action)
        for to, sends in gathered.items():
            world.post(to, sends)

    def _flush(self) -> None:
        answers, self._answers = self._answers, {}
        for to, sends in answers.items():
            self._world.post(to, sends)
