"""A cluster with servers on the virtual clock: its roads, its costs, and when steps repeat.

The machines decide and `virtual.py` drives them, as in every other simulation; this file knows what
lies between the members of a cluster and what its software takes. A *group* is a set of workers in
step with each other on the hosts of a cell; it is simulated as one worker, and weighs on a server's
link as all of them. A *seat group* is the same for servers.
"""

import random
import statistics
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import pairwise

from paceline import spec
from paceline.predict.cells import HostCell
from paceline.predict.clock import Clock
from paceline.predict.codecs import CodecCost, codec_of
from paceline.predict.dealing import Lot
from paceline.predict.device import Device, LayerTime
from paceline.predict.host_sums import HostSums
from paceline.predict.links import WINDOW_BYTES, Links
from paceline.predict.outcome import WorkerLoad
from paceline.predict.pulling import PullingWorker
from paceline.predict.stacks import Constants, Stack
from paceline.predict.timeline import Timeline
from paceline.predict.topology import HostClass, Topology, rate_of
from paceline.predict.virtual import Path, VirtualJob
from paceline.protocol.actions import Send
from paceline.protocol.actions import Work as SeatWork
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import Answer, Copy, Push
from paceline.protocol.plan import Plan
from paceline.units import format_bytes

WARMUP_STEPS, MOST_STEPS = 3, 10
SETTLED = 1e-3
"""Steps that differ by less repeat themselves."""

KERNEL_BYTES = WINDOW_BYTES + (1 << 18)
"""Bytes of each connection on their way and not yet sent (wire/sockets.py).

Compressed chunks are small: the kernel takes so many that the worker's window no longer keeps
urgent ones from queueing."""

INSIDE = "links in the host"


class CellGroup:
    """Workers of one cell that do everything at the same time."""

    def __init__(
        self, index: int, cell: HostCell, workers_per_host: float, devices: int, work: WorkerLoad
    ) -> None:
        self.index, self.cell, self.work = index, cell, work
        self.workers_per_host = workers_per_host
        """How many of them exchange from each host of the cell."""
        self.devices = devices
        """Devices behind each of them, summed inside the host before anything leaves it."""

    @property
    def name(self) -> str:
        return f"worker{self.index}"

    @property
    def count(self) -> float:
        """Workers that exchange."""
        return self.workers_per_host * self.cell.hosts


class SeatGroup:
    """Seats on the hosts of some cells: `count` places that serve alike."""

    def __init__(self, index: int, cells: Sequence[HostCell], count: int, member: str) -> None:
        self.index, self.cells, self.count, self.member = index, cells, count, member
        self.hosts = sum(cell.hosts for cell in cells)


class ClusterRoads:
    """Cables of hosts, links between racks and inside hosts, and what one process can move."""

    def __init__(
        self,
        clock: Clock,
        topology: Topology,
        constants: Constants,
        groups: Sequence[CellGroup],
        seats: Sequence[SeatGroup],
        unevenness: float,
        held_bytes: float,
    ) -> None:
        self.links = Links(clock, held_bytes)
        self._kinds: dict[str, str] = {}
        self._paths: dict[tuple[str, str, bool], Path] = {}
        self._topology, self._unevenness = topology, unevenness
        self._groups = {group.name: group for group in groups}
        self._seats = {seat.member: seat for seat in seats}
        self._local = topology.computing_hosts == 1 and groups[0].devices > 1
        serving = {cell.name: cell for seat in seats for cell in seat.cells}
        cells = {group.cell.name: group.cell for group in groups} | serving
        for cell in cells.values():
            kind = "links of hosts that serve" if cell.name in serving else "links of workers"
            rate = rate_of(cell.of.link, constants) * topology.collisions(constants)
            self._add(cell.name, kind, rate, cell.of.link.latency_seconds / 2)
        for group in groups:
            self._add(f"group{group.index}", "processes of workers", constants.process_rate)
            rate = rate_of(topology.inside, constants)
            for name in HostSums.link_names(f"group{group.index}", group.devices):
                self._add(name, INSIDE, rate)
        for seat in seats:
            self._add(f"seat{seat.index}", "processes of servers", constants.process_rate)
        if topology.uplink is not None:
            rate, latency = rate_of(topology.uplink, constants), topology.uplink.latency_seconds
            for rack in {c.rack for c in topology.classes}:
                self._add(f"rack {rack}", "links between racks", rate, latency / 2)

    def _add(self, name: str, kind: str, rate: float, latency_seconds: float = 0.0) -> None:
        """Both directions of one cable, or of what a process can move."""
        for way in ("out", "in"):
            self.links.add(f"{name} {way}", rate, latency_seconds)
            self._kinds[f"{name} {way}"] = kind

    def path(self, source: str, target: str, *, to_seat: bool) -> Path:
        way = (source, target, to_seat)
        if way not in self._paths:
            self._paths[way] = () if self._local else self._path(source, target, to_seat)
        return self._paths[way]

    def _path(self, source: str, target: str, to_seat: bool) -> Path:
        """The links between a worker of a group and seats, and how many alike cross each."""
        group, seat = (
            self._groups[source if to_seat else target],
            self._seats[target if to_seat else source],
        )
        worker_way, seat_way = ("out", "in") if to_seat else ("in", "out")
        per_seat = group.count / seat.count * self._unevenness
        path = [
            (f"group{group.index} {worker_way}", 1.0),
            (f"seat{seat.index} {seat_way}", per_seat),
        ]
        own = group.workers_per_host
        leaving = own * (1 - 1 / seat.hosts) if group.cell in seat.cells else own
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

    def busy_seconds(self) -> dict[str, float]:
        """Kind of link -> seconds that the busiest of its kind was needed."""
        found: dict[str, float] = {}
        for name, link in self.links.all().items():
            seconds = link.carried_bytes / link.bytes_per_second
            found[self._kinds[name]] = max(seconds, found.get(self._kinds[name], 0.0))
        return found


class ClusterCosts:
    """What a stack's messages and sums take; gradients are added up as they come."""

    def __init__(
        self,
        stack: Stack,
        constants: Constants,
        groups: Sequence[CellGroup],
        seats: Sequence[SeatGroup],
        lots: Sequence[Lot],
        codec: CodecCost,
        state_numbers: int,
    ) -> None:
        """`state_numbers`: what the optimizer keeps for each weight."""
        self._stack, self._constants, self._codec = stack, constants, codec
        self._state_numbers = state_numbers
        self._groups, self._lots = groups, lots
        self._seats = {seat.member: seat for seat in seats}

    def payload_bytes(self, send: Send) -> float:
        assert send.payload is not None
        size_bytes = self._lots[send.payload].chunk.size_bytes
        if isinstance(send.message, Push):
            return size_bytes * self._codec.sent_fraction
        if isinstance(send.message, Copy):  # one of those in the group keeps it
            kept_bytes = size_bytes * self._state_numbers
            return kept_bytes / next(g.count for g in self._groups if g.name == send.to)
        fetched = self._stack.exchange == "answer" or getattr(send.message, "step", -1) == -1
        return float(size_bytes) if fetched else 0.0

    def sending_seconds(self, send: Send) -> float:
        if not isinstance(send.message, Push):
            return 0.0
        size_bytes = self._lots[send.message.chunk].chunk.size_bytes
        return self._codec.encoding_seconds(size_bytes, self._constants.codec_speed)

    def receiving_seconds(self, member: str, sends: Sequence[Send]) -> float:
        return sum(self._receiving_seconds(member, send) for send in sends)

    def _receiving_seconds(self, member: str, send: Send) -> float:
        constants = self._constants
        match send.message:
            case Push() as push:
                lot, seat = self._lots[push.chunk], self._seats[member]
                each = lot.messages * constants.message_seconds
                size_bytes = lot.chunk.size_bytes
                each += size_bytes / constants.sum_rate
                each += self._codec.decoding_seconds(size_bytes, constants.codec_speed)
                return each * self._groups[push.worker].count / seat.count
            case Answer() if send.payload is not None and self.payload_bytes(send):
                return self._lots[send.payload].messages * constants.message_seconds
        return 0.0

    def working_seconds(self, member: str, work: SeatWork) -> float:
        return 0.0  # its time has passed as the gradients came


class Job:
    """Groups, seats and roads; `run` lets some steps pass."""

    def __init__(
        self,
        experiment: spec.Experiment,
        topology: Topology,
        stack: Stack,
        constants: Constants,
        groups: Sequence[CellGroup],
        seats: Sequence[SeatGroup],
        lots: Sequence[Lot],
        plan: Plan,
        *,
        unevenness: float,
        noisy: bool,
        most_steps: int = MOST_STEPS,
        timeline: Timeline | None = None,
    ) -> None:
        """`plan`: groups are its workers. `noisy`: every worker is simulated by itself, and so is
        its jitter."""
        self._stack, self._groups, self._lots = stack, groups, lots
        self._together, self._noisy = experiment.architecture.waits_for_all, noisy
        self._clips = experiment.workload.clip_norm > 0
        self._ahead_steps = plan.rules.staleness
        """So far ahead of the slowest a worker may be."""
        self._most_steps = most_steps + self._ahead_steps
        self._random = random.Random(experiment.workload.seed)
        self._ended = False
        """A group has come to the end of a step since it was last asked."""
        self.clock = Clock()
        codec = codec_of(experiment.architecture)
        held = KERNEL_BYTES if codec.sent_fraction < 1 else 0.0
        self._roads = ClusterRoads(self.clock, topology, constants, groups, seats, unevenness, held)
        state_numbers = experiment.workload.optimizer.state_numbers
        costs = ClusterCosts(stack, constants, groups, seats, lots, codec, state_numbers)
        self._seat_members = [seat.member for seat in seats]
        self._job = VirtualJob(plan, costs, self._roads, self.clock, self._machine)
        self._devices = [self._device(group, plan) for group in groups]
        if timeline is not None:
            self._watch(timeline)

    def _machine(self, plan: Plan, worker: int) -> ExchangeMachine | PullingWorker:
        if self._stack.exchange == "answer":
            return ExchangeMachine(plan, worker)
        owners = [plan.seats[owner].member for owner in plan.owners]
        return PullingWorker(worker, owners, self._random)

    def _device(self, group: CellGroup, plan: Plan) -> Device:
        world, work = self._job.members[group.name], group.work
        layers = [LayerTime(forward, backward) for forward, backward, _ in work.layers]
        device = world.device = Device(plan, world.member, self.clock, layers)
        device.fetches = self._stack.exchange == "pull"
        # Who has the mean clips that, and in other modes its own gradient.
        by_servers = plan.rules.updates and plan.rules.mode == "sync" and not device.fetches
        device.clips = self._clips and by_servers
        device.input_seconds, device.update_seconds = work.input_seconds, work.update_seconds
        jitter = group.cell.of.jitter_fraction if self._noisy else 0.0
        if jitter:
            device.stretch = partial(self._noise, jitter)
        device.on_end = self._note_end
        if group.devices > 1:
            device.sums = HostSums(
                f"group{group.index}",
                group.devices,
                [size for _, _, size in work.layers],
                self._lots,
                self._roads.links,
                ready=device.made,
                done=device.handed_out,
                answers=self._stack.exchange == "answer",
            )
        return device

    def _watch(self, timeline: Timeline) -> None:
        """Tell the timeline of every stretch of computing, and of every message on its way."""
        for group, device in zip(self._groups, self._devices, strict=True):
            device.on_span = partial(timeline.add, group.name, "device")
        timeline.step_ends = self._devices[0].step_ends

        def carried(connection: Hashable, size_bytes: float, start: float, seconds: float) -> None:
            if isinstance(connection, tuple) and size_bytes:
                source, target, to_seat = connection
                name = f"{'gradients' if to_seat else 'weights'}, {format_bytes(size_bytes)}"
                timeline.add(source, f"to {target}", name, start, seconds)
            elif size_bytes:
                name = f"inside the host, {format_bytes(size_bytes)}"
                timeline.add("inside the host", str(connection), name, start, seconds)

        self._roads.links.on_carried = carried

    def _noise(self, fraction: float, layer: int, seconds: float) -> float:
        return seconds * max(0.0, self._random.gauss(1.0, fraction))

    def _note_end(self) -> None:
        self._ended = True

    @property
    def events(self) -> int:
        return self._job.events

    def run(self) -> float:
        """Seconds of a step, once steps repeat themselves or enough have passed."""
        slowest = max(group.work.busy_seconds for group in self._groups)
        behind: list[Device] = []
        for number, (group, device) in enumerate(zip(self._groups, self._devices, strict=True)):
            delay = 0.0
            if not self._together:  # who does not wait for others is anywhere in its step
                delay = number / len(self._groups) * group.work.busy_seconds
            if self._ahead_steps and group.work.busy_seconds == slowest:
                behind.append(device)
            else:
                self.clock.after(delay, device.go_on)
        if behind:  # the others are as far ahead as they may be, sooner or later
            self.clock.run()
            for device in behind:
                self.clock.after(0.0, device.go_on)
        if not self.clock.run(self._is_settled):
            raise AssertionError("the virtual job stands still: a protocol waits for ever")
        return self.step_seconds()

    def _is_settled(self) -> bool:
        if not self._ended:  # asked after everything that happens
            return False
        self._ended = False
        fewest = min(len(device.step_ends) for device in self._devices)
        if fewest >= self._most_steps:
            return True
        if self._ahead_steps or fewest < WARMUP_STEPS + 2:
            return False
        # Workers that wait for all are in step; others must each have come to a pace of their own.
        asked = self._devices[:1] if self._together else self._devices
        return all(_repeats(device.step_ends) for device in asked)

    def step_seconds(self, of: HostClass | None = None) -> float:
        """Of the typical worker, of all or of one class; in step, the same for all."""
        found = [
            (group.count, self._seconds_of(device.step_ends))
            for group, device in zip(self._groups, self._devices, strict=True)
            if of is None or group.cell.of is of
        ]
        return sum(count for count, _ in found) / sum(count / step for count, step in found)

    def _seconds_of(self, ends: Sequence[float]) -> float:
        if self._together and not self._ahead_steps:
            return statistics.median(b - a for a, b in pairwise(ends[WARMUP_STEPS - 1 :]))
        warmup = min(WARMUP_STEPS + self._ahead_steps, len(ends) - 1)
        return (ends[-1] - ends[warmup - 1]) / (len(ends) - warmup)

    def compute_seconds(self) -> float:
        """Of a step: the slowest's where all wait for it, else what a step is on average."""
        if self._together:
            return max(group.work.busy_seconds for group in self._groups)
        busy = total = 0.0
        for group, device in zip(self._groups, self._devices, strict=True):
            steps = group.count / self._seconds_of(device.step_ends)
            busy, total = busy + steps * group.work.busy_seconds, total + steps
        return busy / total

    def needs(self) -> dict[str, float]:
        """Kind of resource -> seconds that the busiest of its kind was busy in each step."""
        steps = statistics.fmean(len(device.step_ends) for device in self._devices)
        found = {kind: seconds / steps for kind, seconds in self._roads.busy_seconds().items()}
        serving = [self._job.members[member].busy_seconds for member in self._seat_members]
        return found | {"work of servers": max(serving) / steps}


def _repeats(ends: Sequence[float]) -> bool:
    """The last step took as long as the one before."""
    first, second = (b - a for a, b in pairwise(ends[-3:]))
    return abs(first - second) < SETTLED * second
