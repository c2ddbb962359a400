"""The protocol's own machines on a virtual clock: members, what carries their messages, devices.

    job = VirtualJob(plan, Costs(), star(clock, plan, 125e6), clock, layers)
    job.run(steps=8)
    job.step_ends      # for each worker, the moment each of its steps ended

Nothing is decided here: `protocol.Member` carries out what the machines decide, and this module
says what it costs. A worker's device computes layer by layer; a layer's forward waits for its own
weights only, and its backward makes its gradients. The same job gives the same moments.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from paceline.predict.clock import Clock
from paceline.predict.links import Links
from paceline.protocol.actions import Action, Departed, Exit, Note, Ready, Send, Usable, Work
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.member import Member
from paceline.protocol.messages import Push
from paceline.protocol.plan import Plan
from paceline.protocol.seat import SeatMachine
from paceline.spec.profile import Layer


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What things take beside links and devices; all zero: ideal members."""

    sum_seconds_per_byte: float = 0.0
    """Of each gradient that a server sums."""

    update_seconds_per_byte: float = 0.0
    """Of a chunk that is updated."""

    work_seconds: float = 0.0
    """Of each piece of work, whatever its size."""

    message_seconds: float = 0.0
    """Added to the way of each parcel."""

    message_bytes: int = 0
    """What a parcel weighs beside its payload."""

    payload_fraction: float = 1.0
    """What compression leaves of a gradient."""


class Roads:
    """Which links a parcel crosses from one member to another; an empty path is inside a host."""

    def __init__(self, links: Links, path: Callable[[str, str], Sequence[str]]) -> None:
        self.links, self.path = links, path


def star(clock: Clock, plan: Plan, bytes_per_second: float, latency_seconds: float = 0.0) -> Roads:
    """Every member has a cable of its own to one switch that is never full."""
    links = Links(clock)
    names = {f"worker{w}" for w in range(plan.workers)} | {seat.member for seat in plan.seats}
    for name in sorted(names):
        links.add(f"{name} out", bytes_per_second, latency_seconds)
        links.add(f"{name} in", bytes_per_second)
    return Roads(links, lambda source, target: (f"{source} out", f"{target} in"))


class VirtualMember:
    """One member's world; a `protocol.World`."""

    def __init__(self, job: "VirtualJob", name: str) -> None:
        self._job, self._name = job, name
        plan = job.plan
        seat = plan.seat_of(name)
        worker = int(name.removeprefix("worker")) if name.startswith("worker") else None
        self.machine = None if worker is None else ExchangeMachine(plan, worker)
        served = None if seat is None else SeatMachine(plan, seat)
        self.member = Member(name, self, self.machine, served)
        self.device: Device | None = None
        self.works: list[Work] = []
        """All that its seat has done, in order."""

    def now(self) -> float:
        return self._job.clock.now

    def moves(self, send: Send) -> int:
        if send.payload is None or self._job.plan.rules.shared:
            return 0
        size_bytes = self._job.plan.layout.chunks[send.payload].size_bytes
        if isinstance(send.message, Push):
            return round(size_bytes * self._job.costs.payload_fraction)
        return size_bytes

    def post(self, to: str, sends: Sequence[Send]) -> None:
        target, costs = self._job.members[to], self._job.costs
        size_bytes = costs.message_bytes + sum(self.moves(send) for send in sends)
        first = sends[0].message
        departs = isinstance(first, Push) and self.moves(sends[0]) > 0
        connection: Hashable = self._name, to, sends[0].seat
        path = self._job.roads.path(self._name, to)
        departed = (lambda: self.tell_departed(first.chunk)) if departs else None  # type: ignore[attr-defined]

        def arrived() -> None:
            self._job.clock.after(costs.message_seconds, lambda: target.receive(sends))

        self._job.roads.links.send(connection, path, size_bytes, arrived, departed)

    def do(self, action: Action) -> None:
        match action:
            case Work():
                seconds = self._seconds_of(action)
                self._job.clock.after(seconds, lambda: self.finish(action))
            case Usable() if self.device is not None:
                self.device.usable(action.chunk)
            case Note():
                self._job.notes.append(action.text)

    def receive(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self.member.receive(send.message, for_seat=send.seat)
        self.member.work()

    def tell_departed(self, chunk: int) -> None:
        self.member.tell(Departed(chunk))

    def finish(self, work: Work) -> None:
        self.works.append(work)
        self.member.finished(
            work, (1.0,) * len(self._job.plan.layout.chunks[work.chunk].parameters)
        )
        self.member.work()

    def _seconds_of(self, work: Work) -> float:
        costs, size_bytes = self._job.costs, self._job.plan.layout.chunks[work.chunk].size_bytes
        sums = 0 if work.kind == "apply" else len(work.parts)
        updates = work.kind in ("update", "apply") and bool(work.parts)
        seconds = costs.work_seconds + sums * size_bytes * costs.sum_seconds_per_byte
        return seconds + updates * size_bytes * costs.update_seconds_per_byte


Stretch = Callable[[int, str, float], float]
"""(worker, layer, profiled seconds) -> the seconds it takes this time."""


class Device:
    """Computes a model's layers one after the other, step after step."""

    def __init__(
        self, job: "VirtualJob", world: VirtualMember, layers: Sequence[Layer], steps: int
    ) -> None:
        self._job, self._world, self._layers, self._steps = job, world, layers, steps
        chunks = job.plan.layout.chunks
        self._chunks_of = [
            {chunk.index for chunk in chunks if index in chunk.parameters}
            for index in range(len(layers))
        ]
        self._lacking: set[int] = set()
        self.step_ends: list[float] = []
        self._life = self._live()

    def go_on(self) -> None:
        """Compute until something is to be waited for."""
        machine = self._world.machine
        assert machine is not None
        for wanted in self._life:
            if isinstance(wanted, float):
                self._job.clock.after(wanted, self.go_on)
                return
            self._lacking = wanted & machine.outstanding
            if self._lacking:
                return

    def usable(self, chunk: int) -> None:
        if self._lacking:
            self._lacking.discard(chunk)
            if not self._lacking:
                self._job.clock.after(0.0, self.go_on)

    def _live(self) -> Iterator[float | set[int]]:
        """Yields the seconds it computes, or the chunks whose weights it needs.

        Layers and parameters of the plan are the same thing, in the same order.
        """
        world, chunks = self._world, self._job.plan.layout.chunks
        assert world.machine is not None
        worker = world.machine.worker
        for _ in range(self._steps):
            for layer, needed in zip(self._layers, self._chunks_of, strict=True):
                yield needed
                yield self._job.stretch(worker, layer.name, layer.forward_seconds)
            unmade = [len(chunk.parameters) for chunk in chunks]
            for index in reversed(range(len(self._layers))):
                layer = self._layers[index]
                yield self._job.stretch(worker, layer.name, layer.backward_seconds)
                for chunk in sorted(self._chunks_of[index]):
                    unmade[chunk] -= 1
                    if unmade[chunk] == 0:
                        world.member.tell(Ready(chunk))
                world.member.work()
            self.step_ends.append(self._job.clock.now)
        yield set(range(len(chunks)))
        world.member.tell(Exit())


class VirtualJob:
    """All members of one job, on one clock."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        roads: Roads,
        clock: Clock,
        layers: Sequence[Layer],
        stretch: Stretch = lambda worker, layer, seconds: seconds,
    ) -> None:
        """`layers`: one for each parameter of the plan, in the same order. `stretch`: jitter,
        stragglers."""
        self.plan, self.costs, self.roads, self.clock, self.stretch = (
            plan, costs, roads, clock, stretch,
        )  # fmt: skip
        self.notes: list[str] = []
        names = {f"worker{w}": None for w in range(plan.workers)}
        names |= {seat.member: None for seat in plan.seats}
        self.members = {name: VirtualMember(self, name) for name in names}
        self._layers = layers

    def run(self, steps: int) -> None:
        """Let every worker take so many steps, and leave."""
        for world in self.members.values():
            if world.machine is not None:
                world.device = Device(self, world, self._layers, steps)
                world.device.go_on()
        self.clock.run()

    @property
    def step_ends(self) -> list[list[float]]:
        """For each worker, when the backward pass of each step had ended."""
        devices = [world.device for world in self.members.values()]
        return [device.step_ends for device in devices if device is not None]
