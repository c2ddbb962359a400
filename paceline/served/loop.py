"""A member's loop: one thread that owns its sockets, and the real world of its machines.

What has come is told to the member, and what its machines want is done here: by sockets, by the
worker's side, by the server's. Nothing is decided.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

import torch

from paceline.errors import JobOver
from paceline.protocol.actions import (
    Action,
    Adopt,
    Blamed,
    CrewChange,
    Departed,
    Dismissed,
    Drop,
    Install,
    Keep,
    KeepCopy,
    KeepState,
    Normed,
    Note,
    Rehomed,
    Send,
    Usable,
    Work,
)
from paceline.protocol.member import Member
from paceline.protocol.messages import Assign, AssignState, Copy, Handed, Push, State
from paceline.served.client import WorkerSide
from paceline.served.job_plan import AnyMessage, JobPlan
from paceline.served.server import ServerSide
from paceline.served.transports import Payloads
from paceline.wire import Closed, Mailbox, Packet

TRAVELLING = (Assign, AssignState, State)
"""Messages whose payloads go in packets also where members share memory."""

IDLE_SECONDS = 0.2
"""How often a loop with nothing to do looks whether it should end."""

SPIN_SECONDS = 0.2e-3
"""So long a loop looks for packets before it sleeps, while its worker does nothing but wait for
them: to be woken takes longer than most answers, and costs the one who sends as much again."""


class MemberLoop:
    """Runs whichever sides a member has until told to stop; a `protocol.World`."""

    def __init__(
        self,
        plan: JobPlan,
        mailbox: Mailbox[AnyMessage],
        worker: WorkerSide | None,
        server: ServerSide | None,
        note: Callable[[str], None],
    ) -> None:
        self._spins = False
        self._plan, self._mailbox, self._note = plan, mailbox, note
        self._worker, self._server = worker, server
        machines = worker.machine if worker else None, server.machine if server else None
        self._member = Member(mailbox.name, self, *machines)
        self._place = worker.place if worker is not None else None
        self._payloads: Payloads = ()
        """Of the packet that is being handled."""
        self._closed: Counter[str] = Counter()
        """Member -> connections that have."""
        self._arrived = 0.0
        self._stopping = threading.Event()
        self._prepare: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._guarded, name="paceline-loop", daemon=True)

    def start(self, prepare: Callable[[], None]) -> None:
        """In a thread of its own, which is prepared first."""
        self._prepare = prepare
        self._thread.start()

    def spin(self) -> None:
        """From here on look for what is waited for before sleeping. For a member with cores of its
        own: elsewhere it would keep others from sending what it waits for."""
        self._spins = True

    def stop(self, seconds: float = 5.0) -> None:
        self._stopping.set()
        self._mailbox.wake()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until `until()` holds; in the calling thread."""
        with torch.no_grad():
            self._run(until)

    def _run(self, until: Callable[[], bool]) -> None:
        mailbox, worker, idle = self._mailbox, self._worker, True
        place = self._place
        while not until():
            arrived = self._look() if idle and self._spins else []
            arrived = arrived or mailbox.receive(IDLE_SECONDS if idle else 0.0, place)
            self._arrived = time.monotonic()
            if worker is not None:
                self._drain(worker)
            for event in arrived:
                if isinstance(event, Closed):
                    self._lose(event)
                    continue
                self._take(event)
                if worker is not None and not event.for_server:
                    worker.release()
                    self._drain(worker)
            idle = self._member.work()
            if worker is not None:
                worker.release()

    def _lose(self, event: Closed) -> None:
        """Between two that serve there are two connections: what came by either has been told when
        both have closed."""
        peer = event.peer
        if event.why:
            self._note(f"{self._mailbox.name} closed the connection to {peer}: {event.why}.")
        self._closed[peer] += 1
        serve_both = all(
            self._plan.seat_of(name) is not None for name in (peer, self._mailbox.name)
        )
        if self._closed[peer] == (2 if serve_both else 1):
            self._member.lose(peer)

    def _look(self) -> list[Packet[AnyMessage] | Closed]:
        """Packets that come within moments, while the training thread waits."""
        worker, end = self._worker, 0.0
        while worker is not None and worker.is_awaited and not worker.requests:
            if arrived := self._mailbox.receive(0.0, self._place):
                return arrived
            now = time.monotonic()
            end = end or now + SPIN_SECONDS
            if now > end:
                break
        return []

    def _guarded(self) -> None:
        try:
            self._prepare()
            self.run(self._stopping.is_set)
        except BaseException as error:
            if self._worker is None:
                raise
            self._worker.fail(error)

    # What has happened.

    def _drain(self, worker: WorkerSide) -> None:
        """Tell the machine what has departed, and do what the training thread asked for."""
        mailbox, requests = self._mailbox, worker.requests
        while (departed := mailbox.departures()) or requests:
            for messages in departed:
                pushes = [m for m in messages if isinstance(m, Push)]
                self._member.tell(*(Departed(push.chunk) for push in pushes))
            if not departed:
                self._member.tell(*requests.popleft())

    def _take(self, packet: Packet[AnyMessage]) -> None:
        self._payloads = packet.payloads
        for message in packet.messages:
            self._member.receive(message, for_seat=packet.for_server)

    # What the machines want.

    def now(self) -> float:
        return time.monotonic()

    def moves(self, send: Send) -> int:
        chunk = send.payload
        if chunk is None:
            return 0
        if isinstance(send.message, TRAVELLING):
            return self._plan.layout.chunks[chunk].size_bytes
        if send.seat:
            assert self._worker is not None
            return self._worker.transports[chunk].moves(chunk)
        assert self._server is not None
        return self._server.transports[send.to].moves(chunk)

    def post(self, to: str, sends: Sequence[Send]) -> None:
        """What has payload to travel comes alone."""
        match sends[0].message:
            case Handed() as handed:
                assert self._worker is not None
                filled, parts = self._worker.hand(handed)
                self._mailbox.send(Packet(to, [filled], parts, for_server=True))
                return
            case Assign() | AssignState():
                assert self._worker is not None
                given, parts = self._worker.given.popleft()
                self._mailbox.send(Packet(to, [given], parts, for_server=True))
                return
            case Copy() | State() as message:
                assert self._server is not None
                stated, parts = self._server.fill(message)
                self._mailbox.send(Packet(to, [stated], parts))
                return
        messages = cast("list[AnyMessage]", [send.message for send in sends])
        chunk, rules = sends[0].payload, self._plan.rules
        payloads: list[memoryview] = []
        if sends[0].seat:
            if chunk is not None:
                assert self._worker is not None
                payloads = self._worker.transports[chunk].gradient_payloads(chunk)
            packet = Packet(to, messages, payloads, for_server=True)
            self._mailbox.send(packet, tracked=rules.window is not None)
        else:
            if chunk is not None:
                assert self._server is not None
                payloads = self._server.transports[to].weights_payloads(chunk)
            self._mailbox.send(Packet(to, messages, payloads), copied=not rules.exclusive)

    def do(self, action: Action) -> None:
        match action:
            case Usable() if self._worker is not None:
                self._worker.usable(action, self._payloads)
            case Keep(push) if self._server is not None:
                self._server.keep(push, self._payloads, self._arrived)
            case Work() if self._server is not None:
                self._member.finished(action, self._server.work(action))
            case Adopt(handed) if self._server is not None:
                own = self._own(handed.worker)
                self._server.adopt(*(own.hand(handed) if own else (handed, self._payloads)))
            case Install(message) if self._server is not None:
                own = self._own(message.worker)
                self._server.install(*(own.given.popleft() if own else (message, self._payloads)))
            case Drop() if self._server is not None:
                self._server.drop(action)
            case Normed() | Blamed() if self._worker is not None:
                self._worker.answer(action)
            case CrewChange() if self._worker is not None:
                self._worker.change(action)
            case KeepCopy(copy) if self._worker is not None:
                self._worker.keep_copy(copy, self._payloads)
            case KeepState(state) if self._worker is not None:
                server, payloads = self._server, self._payloads
                if server is not None and not server.lacks(state.chunk):
                    state, payloads = server.fill(state)
                self._worker.take_state(state, payloads)
            case Rehomed() if self._worker is not None:
                self._worker.rehome(action)
            case Dismissed(reason) if self._worker is not None:
                self._worker.fail(JobOver(reason))
            case Note(text):
                self._note(text)
            case _:
                raise AssertionError(f"nobody here can do {action!r}.")

    def _own(self, worker: int) -> WorkerSide | None:
        """The worker of this process, if it is that one: what it has comes in no packet."""
        own = self._worker
        return own if own is not None and own.machine.worker == worker else None
