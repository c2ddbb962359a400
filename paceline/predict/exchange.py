"""A job with servers on a virtual clock: the protocol's own machines, devices, links.

The machines decide what is sent to whom and when a server may answer, as they do in a real run;
this file only lets time pass. A *group* is a set of workers in step with each other on the hosts of
a cell; it is simulated as one, and weighs on a server's link as all of them.
"""

import random
import statistics
from collections.abc import Iterator, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Any

from paceline import spec
from paceline.predict.cells import Cell
from paceline.predict.clock import Clock
from paceline.predict.dealing import Parcel
from paceline.predict.host_sums import HostSums
from paceline.predict.links import Links
from paceline.predict.outcome import Work
from paceline.predict.pulling import PullingWorker
from paceline.predict.stacks import Constants, Stack
from paceline.predict.topology import Topology, rate_of
from paceline.protocol.actions import Action, Departed, Ready, Send, Usable
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import Answer, Chosen, Message, Push
from paceline.protocol.plan import Plan
from paceline.protocol.seat import SeatMachine

WARMUP_STEPS, MOST_STEPS = 3, 10
SETTLED = 1e-3
"""Steps that differ by less repeat themselves."""


class Group:
    """Workers of one cell that do everything at the same time."""

    def __init__(
        self, index: int, cell: Cell, workers_per_host: float, devices: int, work: Work
    ) -> None:
        self.index, self.cell, self.work = index, cell, work
        self.workers_per_host = workers_per_host
        """How many of them exchange from each host of the cell."""
        self.devices = devices
        """Devices behind each of them, summed inside the host before anything leaves it."""
        self.machine: Any = None
        self.own_seat: int | None = None
        """Where nothing has to travel to."""
        self.sums: HostSums | None = None
        self.needed: set[int] = set()
        """Chunks, or inside a host layers, that the device waits for."""
        self.waits_for_end = False
        self.ends: list[float] = []
        self.waited_seconds = 0.0
        self.waiting_since = 0.0
        self.busy_until = 0.0
        self.device: Iterator[float | set[int] | None] = iter(())

    @property
    def count(self) -> float:
        """Workers that exchange."""
        return self.workers_per_host * self.cell.hosts


class SeatGroup:
    """Seats on the hosts of some cells: `count` places that serve alike."""

    def __init__(self, index: int, cells: Sequence[Cell], count: int, machine: SeatMachine) -> None:
        self.index, self.cells, self.count, self.machine = index, cells, count, machine
        self.hosts = sum(cell.hosts for cell in cells)
        self.busy_until = self.busy_seconds = 0.0


class Job:
    """Groups, seats and links; `run` lets some steps pass."""

    def __init__(
        self,
        experiment: spec.Experiment,
        topology: Topology,
        stack: Stack,
        constants: Constants,
        groups: Sequence[Group],
        seats: Sequence[SeatGroup],
        parcels: Sequence[Parcel],
        plan: Plan,
        *,
        sent_fraction: float,
        unevenness: float,
        together: bool,
        noisy: bool,
    ) -> None:
        """`plan`: groups are its workers. `noisy`: every worker is simulated by itself, and so is
        its jitter."""
        self.clock = Clock()
        self._links = Links(self.clock)
        self._kinds: dict[str, str] = {}
        self._stack, self._constants, self._topology = stack, constants, topology
        self._groups, self._seats, self._parcels, self._plan = groups, seats, parcels, plan
        self._seat_of = {seat.member: own for seat, own in zip(plan.seats, seats, strict=True)}
        self._sent_fraction, self._unevenness = sent_fraction, unevenness
        self._together, self._noisy = together, noisy
        self._random = random.Random(experiment.workload.seed)
        self._local = topology.computing_hosts == 1 and groups[0].devices > 1
        self._ended = False
        """A group has come to the end of a step since it was last asked."""
        self.events = 0
        num_layers = len(groups[0].work.layers)
        self._chunks_of = [
            {p.chunk.index for p in parcels if layer in p.layers} for layer in range(num_layers)
        ]
        self._lay_links()
        for group in groups:
            group.machine = self._machine_for(group)
            group.device = self._device(group)
            if group.devices > 1:
                group.sums = self._sums_of(group)

    # Building

    def _machine_for(self, group: Group) -> ExchangeMachine | PullingWorker:
        if self._stack.exchange == "pull":
            owners = [self._plan.seats[owner].member for owner in self._plan.owners]
            return PullingWorker(group.index, owners)
        machine = ExchangeMachine(self._plan, group.index)
        own = [s.index for s in self._seats if s.hosts == 1 and s.cells[0] is group.cell]
        if own and not group.cell.of.servers:
            group.own_seat = own[min(group.index, len(own) - 1)]
        machine.own_seat = group.own_seat
        return machine

    def _lay_links(self) -> None:
        constants, topology = self._constants, self._topology
        serving = {cell.name: cell for seat in self._seats for cell in seat.cells}
        cells = {group.cell.name: group.cell for group in self._groups} | serving
        for cell in cells.values():
            kind = "links of hosts that serve" if cell.name in serving else "links of workers"
            rate = rate_of(cell.of.link, constants) * topology.collisions(constants)
            self._add(cell.name, kind, rate, cell.of.link.latency_seconds / 2)
        for group in self._groups:
            self._add(f"group{group.index}", "processes of workers", constants.process_rate)
            rate = rate_of(topology.inside, constants)
            for name in HostSums.link_names(f"group{group.index}", group.devices):
                self._add(name, "links in the host", rate)
        for seat in self._seats:
            self._add(f"seat{seat.index}", "processes of servers", constants.process_rate)
        if topology.uplink is not None:
            rate, latency = rate_of(topology.uplink, constants), topology.uplink.latency_seconds
            for rack in {c.rack for c in topology.classes}:
                self._add(f"rack {rack}", "links between racks", rate, latency / 2)

    def _add(self, name: str, kind: str, rate: float, latency_seconds: float = 0.0) -> None:
        """Both directions of one cable, or of what a process can move."""
        for way in ("out", "in"):
            self._links.add(f"{name} {way}", rate, latency_seconds)
            self._kinds[f"{name} {way}"] = kind

    def _path(self, group: Group, seat: SeatGroup, *, push: bool) -> list[tuple[str, float]]:
        """The links between a worker of the group and the seats, and how many alike cross each."""
        worker_way, seat_way = ("out", "in") if push else ("in", "out")
        per_seat = group.count / seat.count * self._unevenness
        path = [
            (f"group{group.index} {worker_way}", 1.0),
            (f"seat{seat.index} {seat_way}", per_seat),
        ]
        at_home = group.cell in seat.cells
        own = group.workers_per_host
        leaving = own * (1 - 1 / seat.hosts) if at_home else own
        if leaving > 0:
            path.append((f"{group.cell.name} {worker_way}", leaving))
            for cell in seat.cells:
                others = group.count - (own if cell is group.cell else 0.0)
                if others > 0:
                    weight = others / seat.hosts * self._unevenness
                    path.append((f"{cell.name} {seat_way}", weight))
        racks = (group.cell.of.rack, seat.cells[0].of.rack)
        if self._topology.uplink is not None and racks[0] != racks[1]:
            path += [(f"rack {racks[0]} {worker_way}", group.count)]
            path += [(f"rack {racks[1]} {seat_way}", group.count)]
        return path

    def _sums_of(self, group: Group) -> HostSums:
        return HostSums(
            f"group{group.index}",
            group.devices,
            [size for _, _, size in group.work.layers],
            self._parcels,
            self._links,
            ready=lambda chunk: self._ready(group, chunk),
            done=lambda layer: self._usable(group, layer),
            answers=self._stack.exchange == "answer",
        )

    # Running

    def run(self) -> float:
        """Seconds of a step, once steps repeat themselves or enough have passed."""
        for number, group in enumerate(self._groups):
            delay = 0.0
            if not self._together:  # who does not wait for others is anywhere in its step
                delay = number / len(self._groups) * group.work.busy_seconds
            self.clock.after(delay, partial(self._go_on, group))
        if not self.clock.run(self._is_settled):
            raise AssertionError("the virtual job stands still: a protocol waits for ever")
        return self._step_seconds()

    def _is_settled(self) -> bool:
        if not self._ended:  # asked after everything that happens
            return False
        self._ended = False
        fewest = min(len(group.ends) for group in self._groups)
        if fewest >= MOST_STEPS:
            return True
        if not self._together or fewest < WARMUP_STEPS + 2:
            return False
        ends = self._groups[0].ends[-3:]
        first, second = (b - a for a, b in pairwise(ends))
        return abs(first - second) < SETTLED * second

    def _step_seconds(self) -> float:
        """Of the typical worker; in step, the same for all."""
        per_group = [
            statistics.median(b - a for a, b in pairwise(group.ends[WARMUP_STEPS - 1 :]))
            if self._together
            else (group.ends[-1] - group.ends[WARMUP_STEPS - 1]) / (len(group.ends) - WARMUP_STEPS)
            for group in self._groups
        ]
        total = sum(group.count for group in self._groups)
        rate = sum(g.count / s for g, s in zip(self._groups, per_group, strict=True))
        return total / rate

    def _device(self, group: Group) -> Iterator[float | set[int] | None]:
        """Yields seconds it computes, chunks whose weights it needs, or None for a step's end."""
        work = group.work
        jitter = group.cell.of.jitter_fraction if self._noisy else 0.0
        while True:
            if isinstance(group.machine, PullingWorker):
                yield None
                if group.sums is not None:
                    group.sums.fetch()
                self._act(group, group.machine.begin())
            if work.input_seconds:
                yield work.input_seconds
            yield from self._forward(group, jitter)
            yield from self._backward(group, jitter)
            if work.update_seconds:
                yield work.update_seconds
            group.ends.append(self.clock.now)
            self._ended = True

    def _forward(self, group: Group, jitter: float) -> Iterator[float | set[int]]:
        """Layers whose weights are there already pass as one."""
        seconds = 0.0
        for layer, (forward, _, _) in enumerate(group.work.layers):
            wanted = self._chunks_of[layer] if group.sums is None else {layer}
            if not wanted.isdisjoint(self._missing(group)):
                if seconds:
                    yield seconds
                    seconds = 0.0
                yield wanted
            seconds += forward * self._noise(jitter)
        yield seconds

    def _backward(self, group: Group, jitter: float) -> Iterator[float]:
        """Layers that complete no chunk pass together with the next that does."""
        unmade = [len(parcel.layers) for parcel in self._parcels]
        seconds = 0.0
        for layer in reversed(range(len(group.work.layers))):
            seconds += group.work.layers[layer][1] * self._noise(jitter)
            complete = []
            for chunk in sorted(self._chunks_of[layer]):
                unmade[chunk] -= 1
                if unmade[chunk] == 0:
                    complete.append(chunk)
            if not complete and group.sums is None and layer > 0:
                continue
            yield seconds
            seconds = 0.0
            if group.sums is not None:
                group.sums.made(layer)
                continue
            for chunk in complete:
                self._ready(group, chunk)

    def _missing(self, group: Group) -> Set[int]:
        return group.sums.pending if group.sums else group.machine.outstanding

    def _noise(self, fraction: float) -> float:
        return max(0.0, self._random.gauss(1.0, fraction)) if fraction else 1.0

    def _go_on(self, group: Group) -> None:
        for wanted in group.device:
            self.events += 1
            if isinstance(wanted, float):
                self.clock.after(wanted, lambda: self._go_on(group))
                return
            group.waiting_since = self.clock.now
            if wanted is None:
                group.waits_for_end = not group.machine.applied
                if group.waits_for_end:
                    return
                continue
            group.needed = wanted & self._missing(group)
            if group.needed:
                return

    def _resume(self, group: Group) -> None:
        group.waited_seconds += self.clock.now - group.waiting_since
        self._go_on(group)

    def _ready(self, group: Group, chunk: int) -> None:
        self._act(group, group.machine.handle(Ready(chunk)))

    def _act(self, group: Group, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(to, Push() as push):
                    self._push(group, self._seat_of[to], push)
                case Send(to, message):
                    self._note(group, self._seat_of[to], message)
                case Usable() if group.sums is not None:
                    group.sums.answered(action.chunk)
                case Usable():
                    self._usable(group, action.chunk)

    def _usable(self, group: Group, wanted: int) -> None:
        if wanted in group.needed:
            group.needed.discard(wanted)
            if not group.needed:
                self._resume(group)

    def _push(self, group: Group, seat: SeatGroup, push: Push) -> None:
        self.events += 1
        departed = lambda: self._act(group, group.machine.handle(Departed(push.chunk)))  # noqa: E731
        if self._local or group.own_seat == seat.index:
            self._served(group, seat, push)
            return
        self._links.send(
            (group.index, seat.index, "push"),
            self._path(group, seat, push=True),
            self._parcels[push.chunk].chunk.size_bytes * self._sent_fraction,
            lambda: self._arrived(group, seat, push),
            departed,
        )

    def _note(self, group: Group, seat: SeatGroup, message: Message) -> None:
        """Something without weights: it takes the way's latency and no part of a link."""
        self.events += 1
        self.clock.after(self._latency(group, seat), lambda: self._served(group, seat, message))

    def _latency(self, group: Group, seat: SeatGroup) -> float:
        return (group.cell.of.link.latency_seconds + seat.cells[0].of.link.latency_seconds) / 2

    def _arrived(self, group: Group, seat: SeatGroup, push: Push) -> None:
        """A seat adds up what arrives, one after the other."""
        parcel, constants = self._parcels[push.chunk], self._constants
        each = parcel.messages * constants.message_seconds
        each += parcel.chunk.size_bytes * self._sent_fraction / constants.sum_rate
        seconds = each * group.count / seat.count
        seat.busy_until = max(seat.busy_until, self.clock.now) + seconds
        seat.busy_seconds += seconds
        self.clock.at(seat.busy_until, lambda: self._served(group, seat, push))

    def _served(self, group: Group, seat: SeatGroup, message: Message) -> None:
        actions = seat.machine.handle(message)
        while (work := seat.machine.take()) is not None:  # its time has passed: see `_arrived`
            actions += seat.machine.done(work)
        for action in actions:
            match action:
                case Send(message=Answer() as answer):
                    weights = self._stack.exchange == "answer" or not isinstance(message, Push)
                    self._answer(seat, self._groups[answer.worker], answer, weights=weights)
                case Send(to, Chosen() as chosen):
                    self._announce(seat, self._groups[int(to.removeprefix("worker"))], chosen)

    def _announce(self, seat: SeatGroup, group: Group, chosen: Chosen) -> None:
        latency = self._latency(group, seat)
        self.clock.after(latency, lambda: self._act(group, group.machine.handle(chosen)))

    def _answer(self, seat: SeatGroup, group: Group, answer: Answer, *, weights: bool) -> None:
        self.events += 1
        if self._local or group.own_seat == seat.index:
            self._noted(group, answer)
            return
        if not weights:
            self.clock.after(self._latency(group, seat), lambda: self._noted(group, answer))
            return
        self._links.send(
            (seat.index, group.index, "answer"),
            self._path(group, seat, push=False),
            self._parcels[answer.chunk].chunk.size_bytes,
            lambda: self._received(group, answer),
        )

    def _received(self, group: Group, answer: Answer) -> None:
        """A worker takes what arrives one after the other too."""
        seconds = self._parcels[answer.chunk].messages * self._constants.message_seconds
        group.busy_until = max(group.busy_until, self.clock.now) + seconds
        self.clock.at(group.busy_until, lambda: self._noted(group, answer))

    def _noted(self, group: Group, answer: Answer) -> None:
        self._act(group, group.machine.handle(answer))
        if group.waits_for_end and group.machine.applied:
            group.waits_for_end = False
            self._resume(group)

    def needs(self) -> dict[str, float]:
        """Kind of resource -> seconds that the busiest of its kind was busy in each step."""
        steps = statistics.fmean(len(group.ends) for group in self._groups)
        found: dict[str, float] = {}
        for name, link in self._links.all().items():
            kind = self._kinds[name]
            seconds = link.carried_bytes / link.bytes_per_second / steps
            found[kind] = max(seconds, found.get(kind, 0.0))
        found["work of servers"] = max(seat.busy_seconds for seat in self._seats) / steps
        return found
