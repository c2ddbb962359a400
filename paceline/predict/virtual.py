"""The protocol's own machines on a virtual clock: members, and what carries their messages.

Nothing is decided here: `protocol.Member` carries out what the machines decide, `Roads` say what a
message crosses and `Costs` what it takes. This is the only driver: a prediction of a cluster
(`exchange.py`) is this job with a cluster's roads and costs, `benchmarks/ideal_links.py` one where
links cost nothing but bytes. The same job gives the same moments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from paceline.predict.clock import Clock
from paceline.predict.device import Device
from paceline.predict.links import Links
from paceline.protocol.actions import Action, Departed, Normed, Note, Send, Usable, Work
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.member import Member
from paceline.protocol.messages import Push
from paceline.protocol.plan import Plan
from paceline.protocol.seat import SeatMachine

Path = Sequence[str | tuple[str, float]]


class Roads(Protocol):
    """What lies between members."""

    links: Links

    def path(self, source: str, target: str, *, to_seat: bool) -> Path:
        """Called for each packet: the links it crosses. None at all: it arrives at once."""


class Costs(Protocol):
    """What things take beside links and devices."""

    def payload_bytes(self, send: Send) -> float:
        """Called for a message with a payload: the bytes that travel for it."""

    def sending_seconds(self, send: Send) -> float:
        """Called before a message leaves: what a member does to its payload, one by one."""

    def receiving_seconds(self, member: str, sends: Sequence[Send]) -> float:
        """Called when a packet has come; a member takes in one after the other, its seat and its
        worker each on their own."""

    def working_seconds(self, member: str, work: Work) -> float:
        """Called when a seat begins some work; one at a time."""


class VirtualMember:
    """One member's world; a `protocol.World`."""

    def __init__(self, job: "VirtualJob", name: str, machine: Any) -> None:
        """`machine`: the worker's side, where there is one."""
        self._job, self.name, self.machine = job, name, machine
        seat = job.plan.seat_of(name)
        served = None if seat is None else SeatMachine(job.plan, seat)
        self.member = Member(name, self, machine, served)
        self.device: Device | None = None
        self.works: list[Work] = []
        """All that its seat has done, in order."""
        self._taken_in_at = {True: 0.0, False: 0.0}
        """When its seat and its worker will have taken in all that has come."""
        self._encoded_at = 0.0
        """When all that it was given to send will have been made ready."""
        self.busy_seconds = 0.0
        """Of its seat, taking in and working."""

    def now(self) -> float:
        return self._job.clock.now

    def moves(self, send: Send) -> int:
        if send.payload is None or self._job.plan.rules.shared:
            return 0
        return round(self._job.costs.payload_bytes(send))

    def post(self, to: str, sends: Sequence[Send]) -> None:
        seconds = sum(map(self._job.costs.sending_seconds, sends))
        self._encoded_at = max(self._encoded_at, self.now()) + seconds
        if self._encoded_at > self.now():  # what follows does not overtake it
            self._job.clock.at(self._encoded_at, partial(self._carry, to, sends))
        else:
            self._carry(to, sends)

    def _carry(self, to: str, sends: Sequence[Send]) -> None:
        job, first, to_seat = self._job, sends[0], sends[0].seat
        job.events += 1
        size_bytes = sum(self.moves(send) for send in sends)
        departed = None
        if isinstance(first.message, Push) and size_bytes:
            departed = partial(self.member.tell, Departed(first.message.chunk))
        arrived = partial(job.members[to].arrive, sends)
        path = job.roads.path(self.name, to, to_seat=to_seat)
        if path:
            job.roads.links.send((self.name, to, to_seat), path, size_bytes, arrived, departed)
            return
        job.clock.after(0.0, arrived)
        if departed is not None:
            job.clock.after(0.0, departed)

    def do(self, action: Action) -> None:
        match action:
            case Work():
                seconds = self._job.costs.working_seconds(self.name, action)
                if seconds:
                    self.busy_seconds += seconds
                    self._job.clock.after(seconds, partial(self._finish_later, action))
                else:
                    self._finish(action)
            case Usable() if self.device is not None:
                self.device.usable(action.chunk)
            case Normed() if self.device is not None:
                self.device.normed()
            case Note():
                self._job.notes.append(action.text)

    def arrive(self, sends: Sequence[Send]) -> None:
        """A packet is here; it is looked at when those before it have been."""
        seconds, seat = self._job.costs.receiving_seconds(self.name, sends), sends[0].seat
        self.busy_seconds += seconds if seat else 0.0
        self._taken_in_at[seat] = max(self._taken_in_at[seat], self.now()) + seconds
        if self._taken_in_at[seat] > self.now():
            self._job.clock.at(self._taken_in_at[seat], partial(self._receive, sends))
        else:
            self._receive(sends)

    def _receive(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self.member.receive(send.message, for_seat=send.seat)
        self.member.work()
        if self.device is not None:
            self.device.look()

    def _finish(self, work: Work) -> None:
        self.works.append(work)
        parameters = self._job.plan.layout.chunks[work.chunk].parameters
        self.member.finished(work, (1.0,) * len(parameters))

    def _finish_later(self, work: Work) -> None:
        self._finish(work)
        self.member.work()


class VirtualJob:
    """All members of one job, on one clock."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        roads: Roads,
        clock: Clock,
        machine: Callable[[Plan, int], Any] = ExchangeMachine,
    ) -> None:
        """`machine`: makes a worker's side; another software's may stand there."""
        self.plan, self.costs, self.roads, self.clock = plan, costs, roads, clock
        self.notes: list[str] = []
        self.events = 0
        """Packets that were sent: what the simulation cost."""
        workers = {f"worker{w}": machine(plan, w) for w in range(plan.workers)}
        serving = {seat.member: None for seat in plan.seats if seat.member not in workers}
        self.members = {
            name: VirtualMember(self, name, made) for name, made in (workers | serving).items()
        }
