"""The worker's side at work: gradients in, weights out, for any thread that trains.

`submit` and `wait` are called by the training thread; everything else runs in the thread of the
member's loop, which owns the machine and the sockets.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.architectures.compression import Codec
from paceline.architectures.server import control
from paceline.architectures.server.control import AnyMessage
from paceline.architectures.server.memory import Flats, Piece, from_buffer, gather
from paceline.errors import DeadlineError
from paceline.protocol import (
    Answer,
    Chosen,
    Commit,
    Departed,
    Join,
    Leave,
    Pull,
    Push,
    Ready,
    Send,
    Usable,
    WorkerMachine,
)
from paceline.wire import Parcel, Post

Command = Callable[[], None]
"""Something the training thread wants done by the loop."""


class WorkerSide:
    """One worker's gradients and weights, chunk by chunk."""

    def __init__(
        self,
        *,
        plan: control.Plan,
        worker: int,
        machine: WorkerMachine,
        held: Flats,
        served: Flats | None,
        gradients: Flats | None,
        post: Post[AnyMessage],
        codec: Codec,
        deadline_seconds: float,
    ) -> None:
        """`held`: where this worker reads weights. `served`: where the servers write them, if that
        is shared memory and another place. `gradients`: this worker's shared segment."""
        self.machine, self.codec = machine, codec
        self.failure: BaseException | None = None
        self._plan, self._worker, self._post = plan, worker, post
        self._members = [seat.member for seat in plan.seats]
        self._held, self._served, self._gradients = held, served, gradients
        self._deadline_seconds = deadline_seconds
        self._commands: deque[Command] = deque()
        self._payloads: dict[int, list[Piece]] = {}
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._awaited: set[int] = set()
        """The pending chunks that the training thread waits for; it is woken when none is left."""
        self._absent: set[int] = set()
        self._squared_norms: dict[int, dict[int, list[float]]] = {}
        """Step -> chunk -> squared norm of each parameter's part."""
        self._states: dict[int, tuple[dict[str, Tensor], list[dict[str, float]]]] = {}
        self._missing: dict[int, list[int]] = {}

    # Called by the training thread.

    @property
    def idle(self) -> bool:
        """Every weight is there; cheap enough to ask before each layer."""
        return not self._pending and self.failure is None

    def submit(self, ready: Sequence[tuple[Ready, list[Piece]]]) -> None:
        """Gradients are made: send them. Shared ones are copied now, while the cache has them."""
        for event, pieces in ready:
            if pieces and self._gradients is not None and not self._is_local(event.chunk):
                gather(pieces, self._gradients.chunk(event.chunk))
        with self._changed:
            self._pending.update(event.chunk for event, _ in ready)
        self.ask(lambda: self._begin(ready))

    def ask(self, command: Command) -> None:
        """Have the loop run something."""
        self._commands.append(command)
        self._post.wake()

    def send_to_all(self, message: AnyMessage) -> None:
        def send() -> None:
            for member in self._members:
                self._post.send(member, [message])

        self.ask(send)

    def join(self) -> None:
        """Become known to every seat, and fetch the weights of all chunks."""
        self.send_to_all(Join(self._worker))

    def pull(self, chunks: Iterable[int]) -> None:
        wanted = list(chunks)
        with self._changed:
            self._pending.update(wanted)
        for chunk in wanted:
            self._ask_owner(chunk, Pull(self._worker, chunk))

    def assign(self, chunk: int, values: Tensor) -> None:
        """Worker 0: set the weights of a chunk at its server."""
        pieces: Any = [(0, values.numel(), values)]
        payload = pieces if self._is_local(chunk) else self.codec.plain(values)
        self._ask_owner(chunk, control.Assign(chunk), [payload])

    def reorder(self, first_use: Sequence[int]) -> None:
        self.ask(lambda: self.machine.reorder(first_use))

    def commit(self, step: int, scale: float) -> None:
        self.send_to_all(Commit(self._worker, step, scale))

    def wait(self, chunks: Iterable[int]) -> float:
        """Return when the weights of these chunks are there; how many seconds it took."""
        with self._changed:
            wanted = self._pending.intersection(chunks)
            self._awaited = set(wanted)
        if not wanted and self.failure is None:
            return 0.0
        began = time.monotonic()
        self._await(lambda: not self._awaited, "the next weights", wanted)
        return time.monotonic() - began

    def wait_all(self) -> float:
        return self.wait(range(len(self._plan.owners)))

    def squared_norms(self, step: int) -> list[float]:
        """Of each parameter's averaged gradient in a held step, when every chunk is summed."""
        everything = set(range(len(self._plan.owners)))
        norms_of = self._squared_norms
        self._await(
            lambda: norms_of.get(step, {}).keys() >= everything, "the gradient's norm", everything
        )
        with self._changed:  # steps whose norms nobody asked for go too
            parts = norms_of[step]
            for past in [s for s in norms_of if s <= step]:
                del norms_of[past]
        totals = [0.0] * len(self._plan.layout.parameters)
        for chunk, norms in sorted(parts.items()):
            for index, norm in zip(self._plan.layout.chunks[chunk].parameters, norms, strict=True):
                totals[index] += norm
        return totals

    def fetch_states(self) -> dict[int, tuple[dict[str, Tensor], list[dict[str, float]]]]:
        """The optimizer's state of every chunk."""
        everything = set(range(len(self._plan.owners)))
        self._states = {}
        for chunk in sorted(everything):
            self._ask_owner(chunk, control.FetchState(self._worker, chunk))
        self._await(lambda: self._states.keys() >= everything, "optimizer state", everything)
        states, self._states = self._states, {}
        return states

    def assign_state(
        self, chunk: int, tensors: dict[str, Tensor], scalars: list[dict[str, float]]
    ) -> None:
        message = control.AssignState(chunk, list(tensors), scalars)
        values = list(tensors.values())
        local = self._is_local(chunk)
        payloads: list[Any] = values if local else [self.codec.plain(v) for v in values]
        self._ask_owner(chunk, message, payloads)

    def confirm(self) -> None:
        """Return when every owner has taken what was sent to it before."""
        owners = self._plan.owners
        asked = {owner: chunk for chunk, owner in reversed(list(enumerate(owners)))}.values()
        with self._changed:
            self._missing.clear()
        for chunk in asked:
            self._ask_owner(chunk, control.Inquire(self._worker, chunk))
        self._await(lambda: self._missing.keys() >= set(asked), "servers to confirm", asked)

    def take_absent(self) -> set[int]:
        """Parameters whose newest mean gradient is of nobody; forgotten with this call."""
        with self._changed:
            absent, self._absent = self._absent, set()
        return absent

    def leave(self, steps: int) -> None:
        self.send_to_all(Leave(self._worker, steps))

    def _await(self, done: Callable[[], bool], what: str, chunks: Iterable[int]) -> None:
        with self._changed:
            finished = self._changed.wait_for(
                lambda: done() or self.failure is not None, self._deadline_seconds
            )
        if self.failure is not None:
            raise self.failure
        if not finished:
            self._explain_silence(what, chunks)

    def _explain_silence(self, what: str, chunks: Iterable[int]) -> None:
        """Ask the owner of the first open chunk whom it waits for; itself, if it is silent too."""
        chunk = min(self._pending.intersection(chunks) or chunks)
        self._ask_owner(chunk, control.Inquire(self._worker, chunk))
        with self._changed:
            self._changed.wait_for(lambda: chunk in self._missing, 2.0)
        workers = self._missing.get(chunk)
        owner = self._members[self._plan.owners[chunk]]
        missing = [owner] if workers is None else [f"worker{w}" for w in workers]
        where = f"worker{self._worker} waits for {what} (chunk {chunk} on {owner}"
        operation = f"{where}, step {self.machine.step})"
        raise DeadlineError(operation, self._deadline_seconds, missing)

    # Called by the loop.

    def place(self, messages: Sequence[AnyMessage]) -> memoryview | None:
        """Where an answer's weights belong. Nobody reads them before the answer is handled."""
        match messages:
            case [Answer(chunk=chunk)]:
                return self._held.buffer(chunk)
        return None

    def drain(self) -> None:
        """Tell the machine what has departed, and do what the training thread asked for."""
        departed = self._post.departed
        while departed or self._commands:
            if not departed:
                self._commands.popleft()()
                continue
            for message in departed.popleft():
                if isinstance(message, Push):
                    self._act(self.machine.handle(Departed(message.chunk)))

    def handle(self, parcel: Parcel[AnyMessage]) -> None:
        payloads = iter(parcel.payloads)
        freed: list[int] = []
        for message in parcel.messages:
            match message:
                case Answer():
                    self._install(message, payloads)
                    self._absent.update(message.absent)
                    freed += self._act(self.machine.handle(message))
                case Chosen():
                    freed += self._act(self.machine.handle(message))
                case _:
                    self._note(message, payloads)
        if freed:
            with self._changed:
                self._pending.difference_update(freed)
                if self._awaited:
                    self._awaited.difference_update(freed)
                    if not self._awaited:
                        self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The loop has ended badly: whoever waits is told."""
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def _begin(self, ready: Sequence[tuple[Ready, list[Piece]]]) -> None:
        actions: list[Any] = []
        for event, pieces in ready:
            self._payloads[event.chunk] = pieces
            actions += self.machine.handle(event)
        self._act(actions)

    def _act(self, actions: Sequence[Send | Usable]) -> list[int]:
        """Do what the machine decided; returns the chunks whose weights have come."""
        freed: list[int] = []
        gathered: dict[int, list[AnyMessage]] = {}
        for action in actions:
            match action:
                case Usable():
                    freed.append(action.chunk)
                case Send(seat, Push() as push) if self._travels(push):
                    self._send_payload(seat, push)
                case Send():
                    gathered.setdefault(action.seat, []).append(action.message)
                    if isinstance(action.message, Push):
                        self._payloads.pop(action.message.chunk, None)
        for seat, messages in gathered.items():
            self._post.send(self._members[seat], messages, tracked=not self._plan.shared)
        return freed

    def _travels(self, push: Push) -> bool:
        """Its gradient goes with it: it has one, and it is not in shared memory."""
        return not push.empty and (self._gradients is None or self._is_local(push.chunk))

    def _send_payload(self, seat: int, push: Push) -> None:
        pieces = self._payloads.pop(push.chunk)
        if self._is_local(push.chunk):
            self._post.send(self._members[seat], [push], [pieces])
            return
        elements = self._held.chunk(push.chunk)
        if len(pieces) == 1 and pieces[0][:2] == (0, elements.numel()):
            values = pieces[0][2]
        else:
            values = gather(pieces, torch.empty_like(elements))
        payload = self.codec.encode(push.chunk, values)
        self._post.send(self._members[seat], [push], [payload], tracked=True)

    def _install(self, answer: Answer, payloads: Any) -> None:
        target = self._held.chunk(answer.chunk)
        if self._plan.shared:
            if self._served is not None:
                target.copy_(self._served.chunk(answer.chunk))
            return
        payload = next(payloads, None)
        if isinstance(payload, Tensor):
            target.copy_(payload)
        elif payload is not None:  # None: it was received into its place, or our own seat wrote it
            target.copy_(from_buffer(payload, target.dtype))

    def _note(self, message: AnyMessage, payloads: Any) -> None:
        with self._changed:
            match message:
                case control.Measured():
                    of_step = self._squared_norms.setdefault(message.step, {})
                    of_step[message.chunk] = message.squared_norms
                case control.Missing():
                    self._missing[message.chunk] = message.workers
                case control.State():
                    dtype = self._held.chunk(message.chunk).dtype
                    values = [
                        p if isinstance(p, Tensor) else from_buffer(p, dtype) for p in payloads
                    ]
                    tensors = dict(zip(message.names, values, strict=True))
                    self._states[message.chunk] = tensors, message.scalars
            self._changed.notify_all()

    def _is_local(self, chunk: int) -> bool:
        return self._members[self._plan.owners[chunk]] == self._post.name

    def _ask_owner(self, chunk: int, message: AnyMessage, payloads: Sequence[Any] = ()) -> None:
        owner = self._members[self._plan.owners[chunk]]
        self.ask(lambda: self._post.send(owner, [message], payloads))
