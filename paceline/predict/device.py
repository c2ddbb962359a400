"""A worker's device on a virtual clock: layers forward and back, step after step.

A layer's forward waits for its own weights only, and its backward makes its gradients. Workers that
update by themselves wait for all means behind backward, and those that clip for the norm of all
gradients. Knows the worker's machine by what is outstanding, and nothing of links.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from paceline.predict.clock import Clock
from paceline.predict.host_sums import HostSums
from paceline.protocol.actions import Exit, Fetch, Ready, Stepped
from paceline.protocol.member import Member
from paceline.protocol.plan import Plan

CLIPPED = 0.5
"""What a step's gradients are multiplied by: what it is does not matter for time."""

Wanted = float | set[int] | Callable[[], bool]
"""Seconds to compute, chunks whose weights are to be there, or what is to be true."""


class LayerTime(NamedTuple):
    forward_seconds: float
    backward_seconds: float


class Device:
    """One worker's, or that of many in step with it."""

    def __init__(
        self,
        plan: Plan,
        member: Member,
        clock: Clock,
        layers: Sequence[LayerTime],
    ) -> None:
        """Layers and parameters of the plan are the same thing, in the same order."""
        self._member, self._clock, self._layers = member, clock, layers
        self._machine: Any = member.worker
        self._layers_of = [chunk.parameters for chunk in plan.layout.chunks]
        self._chunks_of: list[set[int]] = [set() for _ in layers]
        for chunk in plan.layout.chunks:
            for layer in chunk.parameters:
                self._chunks_of[layer].add(chunk.index)
        self.steps: int | None = None
        """None: for ever."""
        self.fetches = False
        """Weights are asked for when a step begins, once all gradients of the last are applied."""
        self.averages = not plan.rules.updates
        """Servers return means, and the worker updates."""
        self.clips = False
        """The servers update when this worker has seen the norm of all gradients."""
        self._is_normed = False
        self.sums: HostSums | None = None
        self.input_seconds = self.update_seconds = 0.0
        self.stretch: Callable[[int, float], float] = lambda layer, seconds: seconds
        """(layer, profiled seconds) -> the seconds it takes this time."""
        self.on_end: Callable[[], None] = lambda: None
        self.on_span: Callable[[str, float, float], None] | None = None
        """(what, since when, seconds): computing, and waiting for weights."""
        self._doing = ""
        self._waiting_since: float | None = None
        self.step_ends: list[float] = []
        self._needed: set[int] = set()
        """Chunks, or with sums inside a host layers, that it waits for."""
        self._awaited: Callable[[], bool] | None = None
        self._life = self._live()

    def go_on(self) -> None:
        """Compute until something is to be waited for."""
        if self._waiting_since is not None and self.on_span is not None:
            waited = self._clock.now - self._waiting_since
            self.on_span("wait for weights", self._waiting_since, waited)
        self._waiting_since = None
        for wanted in self._life:
            if isinstance(wanted, float):
                if self.on_span is not None:
                    self.on_span(self._doing, self._clock.now, wanted)
                self._clock.after(wanted, self.go_on)
                return
            self._waiting_since = self._clock.now
            if callable(wanted):
                if not wanted():
                    self._awaited = wanted
                    return
                continue
            self._needed = wanted & self._missing()
            if self._needed:
                return
            self._waiting_since = None

    def usable(self, wanted: int) -> None:
        """The weights of a chunk, or of a layer, are there."""
        if self.sums is not None:
            self.sums.answered(wanted)
        else:
            self.handed_out(wanted)

    def handed_out(self, wanted: int) -> None:
        if wanted in self._needed:
            self._needed.discard(wanted)
            if not self._needed:
                self._clock.after(0.0, self.go_on)

    def look(self) -> None:
        """Something has come: perhaps what it waits for."""
        if self._awaited is not None and self._awaited():
            self._awaited = None
            self._clock.after(0.0, self.go_on)

    def normed(self) -> None:
        """Every server has summed all gradients of this step."""
        self._is_normed = True

    def made(self, chunk: int) -> None:
        """A chunk's gradients are there to be sent."""
        self._member.tell(Ready(chunk, hold=self.clips, mean=self.averages))
        self._member.work()

    def _missing(self) -> Set[int]:
        if self.sums is not None:
            return self.sums.pending
        missing: Set[int] = self._machine.outstanding
        return missing

    def _live(self) -> Iterator[Wanted]:
        while self.steps is None or len(self.step_ends) < self.steps:
            if self.fetches:
                yield lambda: bool(self._machine.applied)
                if self.sums is not None:
                    self.sums.fetch()
                self._member.tell(Fetch())
            self._doing = "input"
            if self.input_seconds:
                yield self.input_seconds
            yield from self._forward()
            yield from self._backward()
            yield from self._meet()
            self._doing = "update"
            if self.update_seconds:
                yield self.update_seconds
            self.step_ends.append(self._clock.now)
            self.on_end()
        yield set(range(len(self._layers_of)))
        self._member.tell(Exit())

    def _meet(self) -> Iterator[Wanted]:
        """Behind backward, for what the script does before it calls the optimizer."""
        if self.averages:
            yield set(range(len(self._layers_of if self.sums is None else self._layers)))
        elif self.clips:
            yield lambda: self._is_normed
            self._is_normed = False
            self._member.tell(Stepped(CLIPPED))

    def _forward(self) -> Iterator[float | set[int]]:
        """Layers whose weights are there already pass as one."""
        self._doing, seconds = "forward", 0.0
        for index, layer in enumerate(self._layers):
            wanted = self._chunks_of[index] if self.sums is None else {index}
            if not wanted.isdisjoint(self._missing()):
                if seconds:
                    yield seconds
                    seconds = 0.0
                yield wanted
            seconds += self.stretch(index, layer.forward_seconds)
        yield seconds

    def _backward(self) -> Iterator[float]:
        """Layers that complete no chunk pass together with the next that does."""
        unmade = [len(layers) for layers in self._layers_of]
        self._doing, seconds = "backward", 0.0
        for index in reversed(range(len(self._layers))):
            seconds += self.stretch(index, self._layers[index].backward_seconds)
            complete = []
            for chunk in sorted(self._chunks_of[index]):
                unmade[chunk] -= 1
                if unmade[chunk] == 0:
                    complete.append(chunk)
            if not complete and self.sums is None and index > 0:
                continue
            yield seconds
            seconds = 0.0
            if self.sums is not None:
                self.sums.made(index)
                continue
            for chunk in complete:
                self.made(chunk)
