"""A worker's side of a pipeline: which micro-batch of which stage is next, and what goes to whom.

Stages are dealt to workers in turn: stage s lies with worker s % workers. A worker takes its turns
in a fixed order, each as soon as what it needs is there, so all agree without a message more than
activations and their gradients. `handle(event) -> actions`, with no clock; `idle_fraction` runs the
machines of all workers on given seconds, which is what the schedule itself costs.
"""

import heapq
import math
from collections.abc import Callable
from typing import Literal

import msgspec

from paceline import spec
from paceline.errors import ExchangeError
from paceline.protocol.actions import Action, Event

Schedule = Literal["gpipe", "1f1b", "interleaved"]


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One micro-batch's way through one stage, forward or back."""

    kind: Literal["forward", "backward"]
    stage: int
    microbatch: int


class Compute(Action, frozen=True):
    """Take a turn; the machine is told when it is done, and wants one at a time."""

    turn: Turn


class Hand(Action, frozen=True):
    """Give another worker what its turn needs: an activation, or a gradient of one."""

    to: int
    turn: Turn


class Came(Event, frozen=True):
    """What a turn needs is here."""

    turn: Turn


class Computed(Event, frozen=True):
    turn: Turn


class Pipe(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline: who holds which stage, and in which order turns are taken."""

    schedule: Schedule
    workers: int
    microbatches: int
    loops: int = 1
    """Stages on each worker."""

    @classmethod
    def of(cls, options: spec.Pipeline, workers: int) -> "Pipe":
        """One of the pipelines that so many workers make."""
        return cls(
            schedule=options.schedule,
            workers=workers // options.replicas,
            microbatches=options.microbatches,
            loops=options.stages_per_worker,
        )

    @property
    def stages(self) -> int:
        return self.workers * self.loops

    def owner(self, stage: int) -> int:
        return stage % self.workers

    def turns(self, place: int) -> list[Turn]:
        """A worker's turns: some forward to fill the pipeline, then one forward and one backward in
        alternation, then the backward ones that are left."""
        forward = [self._turn("forward", place, number) for number in range(self._each)]
        backward = [self._turn("backward", place, number) for number in range(self._each)]
        ahead = self._ahead(place)
        pairs = [turn for pair in zip(forward[ahead:], backward, strict=False) for turn in pair]
        return [*forward[:ahead], *pairs, *backward[self._each - ahead :]]

    @property
    def _each(self) -> int:
        """Turns of one worker in one direction."""
        return self.microbatches * self.loops

    @property
    def _round(self) -> int:
        """Micro-batches that go through a stage before the worker turns to its next one."""
        return self.microbatches // max(1, self.microbatches // self.workers)

    def _ahead(self, place: int) -> int:
        """Forward turns before the first backward one, in addition to the one just before it."""
        behind = self.workers - 1 - place
        if self.schedule == "gpipe":
            return self._each
        if self.schedule == "1f1b":
            return min(behind, self._each)
        return min((self.loops - 1) * self._round + 2 * behind, self._each)

    def _turn(self, kind: Literal["forward", "backward"], place: int, number: int) -> Turn:
        """The worker's `number`th turn in one direction: a round of micro-batches through each of
        its stages, then the next round."""
        rounds, inside = divmod(number, self._round * self.loops)
        loop, microbatch = divmod(inside, self._round)
        if kind == "backward":
            loop = self.loops - 1 - loop
        return Turn(kind, loop * self.workers + place, rounds * self._round + microbatch)


class PipelineMachine:
    """One worker's turns of one step."""

    def __init__(self, pipe: Pipe, place: int) -> None:
        self._pipe, self._place = pipe, place
        self._turns = pipe.turns(place)
        self._next = 0
        self._is_busy = False
        self._here: set[Turn] = set()

    @property
    def is_over(self) -> bool:
        return self._next == len(self._turns) and not self._is_busy

    def begin(self) -> list[Action]:
        """The batch is there."""
        return self._go_on()

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Came(turn):
                self._here.add(turn)
                return self._go_on()
            case Computed(turn) if self._is_busy:
                self._is_busy = False
                return [*self._pass_on(turn), *self._go_on()]
        raise ExchangeError(f"a worker of a pipeline cannot handle {event!r}.")

    def _go_on(self) -> list[Action]:
        if self._is_busy or self._next == len(self._turns):
            return []
        turn = self._turns[self._next]
        needs_nothing = turn.kind == "forward" and turn.stage == 0
        if not needs_nothing and turn not in self._here:
            return []
        self._here.discard(turn)
        self._next, self._is_busy = self._next + 1, True
        return [Compute(turn)]

    def _pass_on(self, turn: Turn) -> list[Action]:
        """The last stage's output makes the loss, and so the gradient that its own way back needs;
        the first stage's way back ends there."""
        kind, stage = turn.kind, turn.stage
        if kind == "forward" and stage == self._pipe.stages - 1:
            kind = "backward"
        elif kind == "backward" and stage == 0:
            return []
        else:
            stage += 1 if kind == "forward" else -1
        following = Turn(kind, stage, turn.microbatch)
        to = self._pipe.owner(stage)
        if to == self._place:
            self._here.add(following)
            return []
        return [Hand(to, following)]


def idle_fraction(pipe: Pipe, seconds: Callable[[Turn], float]) -> float:
    """The part of a step in which a worker, on average, has nothing to compute: what the schedule
    and uneven stages cost where handing on takes no time."""
    machines = [PipelineMachine(pipe, place) for place in range(pipe.workers)]
    ends: list[tuple[float, int, Turn]] = []
    now = busy = 0.0

    def act(place: int, actions: list[Action]) -> None:
        nonlocal busy
        for action in actions:
            match action:
                case Compute(turn):
                    busy += seconds(turn)
                    order = (now + seconds(turn), place, turn)
                    heapq.heappush(ends, order)
                case Hand(to, turn):
                    act(to, machines[to].handle(Came(turn)))

    for place, machine in enumerate(machines):
        act(place, machine.begin())
    while ends:  # a worker computes one turn at a time, so no two entries tie on time and place
        now, place, turn = heapq.heappop(ends)
        act(place, machines[place].handle(Computed(turn)))
    if not all(machine.is_over for machine in machines):
        raise ExchangeError("a pipeline stands still: its workers wait for each other.")
    return 0.0 if math.isclose(now, 0.0) else 1.0 - busy / (now * pipe.workers)
