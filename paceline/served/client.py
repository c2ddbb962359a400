"""The worker's side for the thread that trains: gradients in, weights out, and what it waits for.

That thread puts what it wants into `requests`; the member's loop (`loop.py`), which owns machine
and sockets, takes it from there and tells what came of it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from paceline.errors import DeadlineError, JobOver
from paceline.protocol.actions import (
    Asked,
    Assigned,
    Blamed,
    Configured,
    CrewChange,
    Enter,
    Event,
    Exit,
    Fetch,
    FetchStates,
    Normed,
    Ready,
    Rehomed,
    Stepped,
    Usable,
    Used,
)
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import Answer, Assign, AssignState, Copy, Handed, Settings, State
from paceline.served.compression import Codec
from paceline.served.job_plan import AnyMessage, JobPlan
from paceline.served.memory import Flats, Piece, as_buffer, from_buffer
from paceline.served.transports import Payloads, Transport

Request = Sequence[Event]
"""For the machine, at one moment."""

Submitted = Sequence[tuple[Ready, list[Piece]]]

ChunkState = tuple[dict[str, Tensor], list[dict[str, float]]]


class Moment(Protocol):
    """A point in what a device does; `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Return when it is reached."""

    def query(self) -> bool:
        """Whether it is reached."""


class WorkerSide:
    """One worker's gradients and weights, chunk by chunk."""

    def __init__(
        self,
        *,
        plan: JobPlan,
        machine: ExchangeMachine,
        held: Flats,
        transports: Sequence[Transport],
        inside: Transport | None = None,
        codec: Codec,
        wake: Callable[[], None],
        lost_from: Callable[[int, int], None],
        deadline_seconds: float,
    ) -> None:
        """`held`: where this worker reads weights. `transports`: of each chunk. `inside`: to the
        seat in this process, should others' chunks come there. `wake`: has the loop look at
        `requests`."""
        self.machine, self.codec, self.transports = machine, codec, list(transports)
        self._inside = inside
        self.requests: deque[Request] = deque()
        self.given: deque[tuple[Assign | AssignState, list[memoryview]]] = deque()
        """Weights and state that servers are to take, for the loop: in the order of requests."""
        self.crew: deque[CrewChange] = deque()
        """Changes of who is in the job, for the training thread to take between steps."""
        self.lost: set[int] = set()
        """Workers that are known to be lost, from whichever step on."""
        self.rehomed: deque[Rehomed] = deque()
        """Servers that were lost, for the training thread to take note of between steps."""
        self.failure: BaseException | None = None
        self._plan, self._held, self._wake, self._lost_from = plan, held, wake, lost_from
        self._name = f"worker{machine.worker}"
        self._num_chunks = len(plan.owners)
        self._deadline_seconds = deadline_seconds
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        """Weights that are not where the training thread reads them: from its asking, which the
        machine may not have heard of yet, until they are in their place, which is after the answer
        that ends what is `outstanding` there."""
        self._waits: dict[threading.Lock, set[int]] = {}
        """Of each thread that waits for weights: what lets it go on, and the chunks that have not
        come. A lock of its own takes a third of the time of a condition."""
        self._freed: list[int] = []
        self._normed: Normed | None = None
        self._states: dict[int, ChunkState] = {}
        self._copies: dict[int, dict[int, tuple[Copy, Payloads]]] = {}
        """Chunk -> version -> the state that is kept for when its server is lost."""
        self._blamed: dict[int, tuple[int, ...]] = {}

    # Called by the training thread.

    @property
    def idle(self) -> bool:
        """Every weight is there; cheap enough to ask before each layer."""
        return not self._pending and self.failure is None

    @property
    def is_awaited(self) -> bool:
        """The training thread waits for weights."""
        return bool(self._waits)

    def submit(self, ready: Submitted, made: Moment | None = None) -> None:
        """Gradients are made, or will be at a moment: send them."""
        assert made is None, "in main memory they are there when they are told of"
        for event, pieces in ready:
            if pieces:
                self.transports[event.chunk].put_gradient(event.chunk, pieces)
        events = [event for event, _ in ready]
        with self._changed:
            self._pending.update([event.chunk for event in events])
        self._ask(events)

    def fetch(self) -> None:
        """Ask for the present weights of all chunks, with all that this worker has sent."""
        with self._changed:
            self._pending.update(range(self._num_chunks))
        self._ask([Fetch()])

    def join(self) -> None:
        """Enter a job that runs: return when the weights of the first step are there."""
        with self._changed:
            self._pending.update(range(self._num_chunks))
        self._ask([Enter()])
        self.wait_all()

    def assign(self, chunk: int, values: Tensor) -> None:
        """Worker 0: set the weights of a chunk at its server."""
        self._give(Assign(self.machine.worker, chunk), [as_buffer(values)])

    def configure(self, groups: list[Settings]) -> None:
        """The optimizer's settings, from the next gradient or commit on."""
        self._ask([Configured(groups)])

    def reorder(self, first_use: Sequence[int]) -> None:
        self._ask([Used(tuple(first_use))])

    def commit(self, scale: float) -> None:
        """The step on hold may be updated."""
        self._ask([Stepped(scale)])

    def leave(self, *, failed: bool = False) -> None:
        self._ask([Exit(failed)])

    def wait(self, chunks: Iterable[int]) -> float:
        """Return when the weights of these chunks are there; how many seconds it took."""
        with self._changed:
            if self.failure is not None:
                raise self.failure
            wanted = self._pending.intersection(chunks)
            if not wanted:
                return 0.0
            came = threading.Lock()
            came.acquire()
            self._waits[came] = wanted
        began = time.monotonic()
        try:
            came.acquire(timeout=self._deadline_seconds)
        finally:
            with self._changed:
                self._waits.pop(came, None)
        if self.failure is not None:
            raise self.failure
        if wanted:
            self._explain_silence("the next weights", wanted)
        return time.monotonic() - began

    def wait_all(self) -> float:
        return self.wait(range(self._num_chunks))

    def squared_norms(self, step: int) -> tuple[tuple[float, ...], float]:
        """Of each parameter's averaged gradient in a step on hold, when every chunk is summed; and
        how many seconds it took."""
        everything = range(self._num_chunks)
        began = time.monotonic()
        self._await(lambda: self._norms_of(step) is not None, "the gradient's norm", everything)
        norms = self._norms_of(step)
        assert norms is not None
        return norms, time.monotonic() - began

    def _norms_of(self, step: int) -> tuple[float, ...] | None:
        normed = self._normed
        return normed.squared_norms if normed is not None and normed.step == step else None

    def fetch_states(self) -> dict[int, ChunkState]:
        """The optimizer's state of every chunk."""
        everything = range(self._num_chunks)
        self._states = {}
        self._ask([FetchStates()])
        self._await(lambda: len(self._states) == len(everything), "optimizer state", everything)
        states, self._states = self._states, {}
        return states

    def assign_state(
        self, chunk: int, tensors: dict[str, Tensor], scalars: list[dict[str, float]]
    ) -> None:
        message = AssignState(self.machine.worker, chunk, list(tensors), scalars)
        self._give(message, [as_buffer(values) for values in tensors.values()])

    def _give(self, message: Assign | AssignState, payloads: list[memoryview]) -> None:
        self.given.append((message, payloads))
        self._ask([Assigned(message.chunk, state=isinstance(message, AssignState))])

    def confirm(self) -> None:
        """Return when every owner has taken what was sent to it before."""
        everything = range(self._num_chunks)
        self._blamed = {}
        self._ask([Asked(chunk) for chunk in everything])
        self._await(lambda: len(self._blamed) == len(everything), "servers to confirm", everything)

    def close(self) -> None:
        """Nothing more is asked for; after it the loop knows of all that was."""

    def _ask(self, request: Request) -> None:
        self.requests.append(request)
        self._wake()

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
        self._blamed.pop(chunk, None)  # an earlier answer may be there
        self._ask([Asked(chunk)])
        with self._changed:
            self._changed.wait_for(lambda: chunk in self._blamed, 2.0)
        workers, owner = self._blamed.get(chunk), self.machine.owner(chunk)
        missing = [owner] if workers is None else [f"worker{w}" for w in workers]
        where = f"{self._name} waits for {what} (chunk {chunk} on {owner}"
        operation = f"{where}, step {self.machine.step})"
        raise DeadlineError(operation, self._deadline_seconds, missing)

    # Called by the loop.

    def place(self, messages: Sequence[AnyMessage]) -> memoryview | None:
        """Where an answer's weights belong. Nobody reads them before the answer is handled, but for
        a server that takes in a lost one's chunks."""
        match messages:
            case [Answer(chunk=chunk)] if not self._plan.rules.second_homes:
                return self._held.buffer(chunk)
        return None

    def usable(self, action: Usable, payloads: Payloads) -> None:
        """Weights have come; the training thread hears of it with the next `release`."""
        self.transports[action.chunk].take_weights(action.chunk, payloads)
        if action.chunk in self._copies:
            kept = self._copies[action.chunk]
            self._copies[action.chunk] = {v: c for v, c in kept.items() if v >= action.version}
        self._freed.append(action.chunk)

    def change(self, crew: CrewChange) -> None:
        """Somebody comes or is lost."""
        for worker in crew.lost:
            self._lost_from(worker, -1 if crew.cut is None else crew.cut)
        self.lost.update(crew.lost)
        self.crew.append(crew)

    def release(self) -> None:
        """Let the training thread go on with what has come."""
        if not self._freed:
            return
        freed, self._freed = self._freed, []
        with self._changed:
            self._pending.difference_update(freed)
            for came, wanted in list(self._waits.items()):
                wanted.difference_update(freed)
                if not wanted:
                    self._let_go(came)

    def _let_go(self, waits: threading.Lock) -> None:
        del self._waits[waits]
        waits.release()

    def answer(self, told: Normed | Blamed) -> None:
        with self._changed:
            match told:
                case Normed():
                    self._normed = told
                case Blamed(chunk, workers):
                    self._blamed[chunk] = workers
            self._changed.notify_all()

    def take_state(self, message: State, payloads: Payloads) -> None:
        dtype = self._held.chunk(message.chunk).dtype
        values = [from_buffer(payload, dtype) for payload in payloads if payload is not None]
        with self._changed:
            tensors = dict(zip(message.names, values, strict=True))
            self._states[message.chunk] = tensors, message.scalars
            self._changed.notify_all()

    def keep_copy(self, copy: Copy, payloads: Payloads) -> None:
        self._copies.setdefault(copy.chunk, {})[copy.version] = copy, payloads

    def hand(self, handed: Handed) -> tuple[Handed, list[memoryview]]:
        """What is here of a chunk, with its state, for a server that takes it in."""
        payloads: list[memoryview] = [self._held.buffer(handed.chunk)]
        if handed.bare:
            return handed, payloads
        copy, state = self._copies[handed.chunk][handed.version]
        payloads += [payload for payload in state if payload is not None]
        handed = msgspec.structs.replace(handed, names=copy.names, scalars=copy.scalars)
        return handed, payloads

    def rehome(self, action: Rehomed) -> None:
        """A server was lost: others answer from now on."""
        self.rehomed.append(action)
        for chunk, owner in enumerate(action.owners):
            if owner == self.machine.own_seat and self._inside is not None:
                self.transports[chunk] = self._inside

    def fail(self, error: BaseException) -> None:
        """The loop has ended badly: whoever waits is told."""
        with self._changed:
            self.failure = error
            if isinstance(error, JobOver):
                error.told()
            for came in list(self._waits):
                self._let_go(came)
            self._changed.notify_all()
