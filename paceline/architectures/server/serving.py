"""The server's side at work: feeds its machine from parcels and does what the machine decides.

Runs in the thread of the member's loop: alone in a server member, beside the worker's side when
colocated. Holds the weights of its chunks (or, with `update = "worker"`, their averaged gradients).
"""

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.architectures.compression import Codec
from paceline.architectures.server import control
from paceline.architectures.server.control import AnyMessage
from paceline.architectures.server.memory import (
    Flats,
    Piece,
    as_buffer,
    from_buffer,
    gather,
)
from paceline.architectures.server.sums import mean
from paceline.architectures.server.updates import ChunkOptimizers
from paceline.protocol import (
    Announce,
    Answer,
    Commit,
    Drop,
    Join,
    Leave,
    Measure,
    Pull,
    Push,
    ServerMachine,
    Update,
)
from paceline.wire import Parcel, Post

FLUSH_SECONDS = 0.004
"""Answers that carry no payload are gathered this long, so that many share one message."""


class ServerSide:
    """One seat: some chunks, their weights, who waits for them."""

    def __init__(
        self,
        *,
        plan: control.Plan,
        seat: int,
        machine: ServerMachine,
        served: Flats,
        gradients: dict[int, Flats],
        post: Post[AnyMessage],
        codec: Codec,
        exclusive: bool,
        answers_early: bool,
    ) -> None:
        """`gradients`: the segments of workers that share memory with this seat.

        `exclusive`: a chunk's weights stay as they are from the answer until all workers push it
        again, so that they may be sent from where they lie. `answers_early`: a worker may write
        its next gradient before this one is summed.
        """
        self.machine = machine
        self.joined: set[int] = set()
        self.expected = set(machine.members.workers)
        self.summed_bytes = 0
        self.busy_seconds = 0.0
        self.queueing_seconds = 0.0
        self._plan, self._post, self._codec = plan, post, codec
        self._served, self._gradients = served, gradients
        self._exclusive, self._answers_early = exclusive, answers_early
        self._chunks = [i for i, owner in enumerate(plan.owners) if owner == seat]
        self._optimizers: ChunkOptimizers | None = None
        self._hyper: dict[int, list[control.Settings]] = {}
        self._kept: dict[tuple[int, int], deque[list[Piece]]] = {}
        self._held: dict[int, Tensor] = {}
        self._scales: dict[int, float] = {}
        self._unassigned = set() if plan.shared else set(self._chunks)
        self._early: list[tuple[str, Pull]] = []
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._outbox: dict[str, list[AnyMessage]] = {}
        self._flushed = 0.0
        self._tasks: list[tuple[int, int, float, list[Any]]] = []
        self._task_count = 0
        self.deliver: Callable[[Parcel[AnyMessage]], None] | None = None
        """Hands answers to the worker's side of this process without a detour."""
        if plan.optimizer:
            self._optimizers = ChunkOptimizers(plan.optimizer, plan.groups)
            for chunk in self._chunks:
                group = plan.layout.flats[plan.layout.chunks[chunk].flat].group
                parameters = plan.layout.chunks[chunk].parameters
                ranges = [self._range(chunk, index) for index in parameters]
                self._optimizers.add(chunk, served.chunk(chunk), group, ranges)

    @property
    def finished(self) -> bool:
        """Every worker came and has left again."""
        return self.joined >= self.expected and not self.machine.members.workers

    @property
    def has_work(self) -> bool:
        return bool(self._tasks)

    def work(self, until: float) -> None:
        """Do the most urgent of what was decided: the chunk that forward passes need first."""
        while self._tasks:
            _, _, arrived, actions = heapq.heappop(self._tasks)
            for action in actions:
                self._act(action, arrived)
            self.flush(force=False)
            if time.monotonic() > until:
                break

    def handle(self, parcel: Parcel[AnyMessage], arrived: float) -> None:
        payloads = iter(parcel.payloads)
        for message in parcel.messages:
            match message:
                case Push():
                    self._take(message, payloads, arrived)
                case control.Hyper():
                    self._hyper[message.worker] = message.groups
                case control.Assign():
                    self._assign(message, next(payloads))
                case control.AssignState():
                    self._assign_state(message, payloads)
                case control.FetchState():
                    self._send_state(parcel.peer, message.chunk)
                case control.Inquire():
                    missing = control.Missing(message.chunk, self.machine.missing(message.chunk))
                    self._reply(parcel.peer, [missing])
                case Pull() if message.chunk in self._unassigned:
                    self._early.append((parcel.peer, message))
                case _:
                    self._note(message)
                    self._plan_work(self.machine.handle(message), arrived)

    def flush(self, force: bool = True) -> None:
        """Send the gathered answers; unless forced, only when the oldest has waited its time."""
        if not self._outbox or not (force or time.monotonic() - self._flushed > FLUSH_SECONDS):
            return
        outbox, self._outbox = self._outbox, {}
        for peer, messages in outbox.items():
            self._reply(peer, messages)
        self._flushed = time.monotonic()

    def _note(self, message: AnyMessage) -> None:
        if isinstance(message, Commit):
            self._scales = {message.step: message.scale}
        elif isinstance(message, Join | Leave):
            self.joined.add(message.worker)

    def _take(self, push: Push, payloads: Any, arrived: float) -> None:
        """Put a gradient where the machine's actions find it, then let the machine decide."""
        if not push.empty:
            pieces = self._pieces(push, payloads)
            self._kept.setdefault((push.chunk, push.worker), deque()).append(pieces)
        self._plan_work(self.machine.handle(push), arrived)

    def _plan_work(self, actions: Sequence[Any], arrived: float) -> None:
        """Announcements go at once; the rest waits its turn, chunk by chunk."""
        by_chunk: dict[int, list[Any]] = {}
        for action in actions:
            match action:
                case Announce():
                    for worker in self.machine.members.workers:
                        self._gather(f"worker{worker}", action.chosen)
                case Drop() if not action.push.empty:
                    by_chunk.setdefault(action.push.chunk, []).append(action)
                case Update() | Answer() | Measure():
                    by_chunk.setdefault(action.chunk, []).append(action)
        for chunk, work in by_chunk.items():
            self._task_count += 1
            urgency = self._plan.layout.chunks[chunk].first_use
            heapq.heappush(self._tasks, (urgency, self._task_count, arrived, work))

    def _pieces(self, push: Push, payloads: Any) -> list[Piece]:
        if push.worker in self._gradients:
            values = self._gradients[push.worker].chunk(push.chunk)
            return [(0, values.numel(), values.clone() if self._answers_early else values)]
        payload = next(payloads)
        if isinstance(payload, list):  # from the worker in this process: tensors as they are
            return payload
        target = self._served.chunk(push.chunk)
        values = self._codec.decode(payload, target.numel(), target.dtype)
        return [(0, target.numel(), values)]

    def _act(self, action: Any, arrived: float) -> None:
        match action:
            case Answer():
                self.queueing_seconds += time.monotonic() - arrived
                self._answer(action)
            case Update():
                self._update(action)
            case Measure():
                self._measure(action)
            case Drop():
                self._kept[action.push.chunk, action.push.worker].popleft()

    def _update(self, update: Update) -> None:
        if not update.parts:  # nobody had a gradient: as when `grad` is None
            return
        began = time.monotonic()
        gradient = self._held.pop(update.chunk, None)
        if gradient is None:
            target = self._served.chunk(update.chunk) if update.mean else None
            gradient = self._mean(update, target)
        scale = self._scales.get(update.step, 1.0)
        if scale != 1.0:
            gradient.mul_(scale)
        if not update.mean:
            assert self._optimizers is not None, "a plan without an optimizer averages only"
            groups = self._hyper.get(update.parts[0][0], self._plan.groups)
            spared = [self._range(update.chunk, index) for index in update.absent]
            self._optimizers.apply(update.chunk, gradient, groups, spared)
        self.busy_seconds += time.monotonic() - began

    def _range(self, chunk: int, parameter: int) -> slice:
        """Where a parameter lies in a chunk."""
        place, facts = self._plan.layout.places[parameter], self._plan.layout.chunks[chunk]
        return slice(
            max(place.start, facts.start) - facts.start, min(place.stop, facts.stop) - facts.start
        )

    def _mean(self, action: Update | Measure, into: Tensor | None) -> Tensor:
        parts = [
            (self._kept[action.chunk, worker].popleft(), weight) for worker, weight in action.parts
        ]
        if into is None:
            like = self._served.chunk(action.chunk)
            scratch = self._scratch.get(like.dtype)
            if scratch is None or scratch.numel() < like.numel():
                scratch = self._scratch[like.dtype] = torch.empty_like(like)
            into = scratch[: like.numel()]
        self.summed_bytes += len(parts) * into.numel() * into.element_size()
        return mean(parts, into)

    def _measure(self, measure: Measure) -> None:
        """Sum a held chunk, keep the sum, and tell every worker its norms."""
        like = self._served.chunk(measure.chunk)
        gradient = torch.zeros_like(like)
        if measure.parts:
            gradient = self._held[measure.chunk] = self._mean(measure, gradient)
        parameters = self._plan.layout.chunks[measure.chunk].parameters
        parts = [gradient[self._range(measure.chunk, index)] for index in parameters]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64).item() for part in parts]
        measured = control.Measured(measure.chunk, measure.step, [n * n for n in norms])
        for worker in self.machine.members.workers:
            self._gather(f"worker{worker}", measured)

    def _answer(self, answer: Answer) -> None:
        peer = f"worker{answer.worker}"
        if self._plan.shared or (self._exclusive and peer == self._post.name):
            self._gather(peer, answer)
            return
        self.flush()  # announcements keep their place before the answer
        if peer == self._post.name:
            self._reply(peer, [answer], [self._served.chunk(answer.chunk)])
        else:
            self._reply(peer, [answer], [self._served.buffer(answer.chunk)])

    def _reply(self, peer: str, messages: list[AnyMessage], payloads: Sequence[Any] = ()) -> None:
        if peer == self._post.name and self.deliver is not None:
            self.deliver(Parcel(peer, messages, payloads))
        else:
            self._post.reply(peer, messages, payloads, copy=not self._exclusive)

    def _gather(self, peer: str, message: AnyMessage) -> None:
        if not self._outbox:
            self._flushed = time.monotonic()
        self._outbox.setdefault(peer, []).append(message)

    def _assign(self, message: control.Assign, payload: Any) -> None:
        weights = self._served.chunk(message.chunk)
        if isinstance(payload, list):
            gather(payload, weights)
        else:
            weights.copy_(from_buffer(payload, weights.dtype))
        self._unassigned.discard(message.chunk)
        due = [entry for entry in self._early if entry[1].chunk == message.chunk]
        self._early = [entry for entry in self._early if entry[1].chunk != message.chunk]
        for _, pull in due:
            self._plan_work(self.machine.handle(pull), time.monotonic())

    def _assign_state(self, message: control.AssignState, payloads: Any) -> None:
        assert self._optimizers is not None
        dtype = self._served.chunk(message.chunk).dtype
        tensors = {}
        for name in message.names:
            payload = next(payloads)
            tensors[name] = payload if isinstance(payload, Tensor) else from_buffer(payload, dtype)
        self._optimizers.set_state(message.chunk, tensors, message.scalars)

    def _send_state(self, peer: str, chunk: int) -> None:
        assert self._optimizers is not None
        tensors, scalars = self._optimizers.state(chunk)
        payloads: list[Any] = [values.clone() for values in tensors.values()]
        if peer != self._post.name:
            payloads = [as_buffer(values) for values in payloads]
        self._reply(peer, [control.State(chunk, list(tensors), scalars)], payloads)

    def counters(self) -> dict[str, object]:
        """What this seat saw, for the record."""
        staleness = {
            f"worker{worker}": dict(sorted(counts.items()))
            for worker, counts in sorted(self.machine.staleness.items())
        }
        chunks = self._plan.layout.chunks
        served_bytes = sum(chunks[chunk].size_bytes for chunk in self._chunks)
        return {
            "served_bytes": served_bytes,
            "served_fraction": served_bytes / max(self._plan.layout.size_bytes, 1),
            "summed_bytes": self.summed_bytes,
            "staleness": staleness,
            "late_gradients": _named(self.machine.late),
            "busy_seconds": self.busy_seconds,
            "queueing_seconds": self.queueing_seconds,
            "refused_parcels": self._post.refused,
        }


def _named(counts: Counter[int]) -> dict[str, int]:
    return {f"worker{worker}": count for worker, count in sorted(counts.items())}
