"""Cuts a step's gradients into chunks, and hands each to the exchange when it is complete."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from paceline.errors import ExchangeError
from paceline.protocol.actions import Ready
from paceline.protocol.chunks import Layout
from paceline.served.client import Moment, Submitted, WorkerSide
from paceline.served.memory import Piece, as_row, pieces_of

Made = tuple[Sequence[tuple[int, Tensor]], Moment]
"""Gradients of recorded passes with their numbers, and when the last of them is made."""

Stretch = tuple[Submitted, Moment]
"""What is complete at a moment."""


class Cutter:
    """How far the gradients of one step have come."""

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        layout: Layout,
        worker: WorkerSide,
        weight: Callable[[], float],
    ) -> None:
        """`weight`: what this worker's gradients of the step count, an equal part being 1."""
        self._weight = weight
        self._names, self._tensors = names, tensors
        self._layout, self._worker = layout, worker
        self._chunks_of: list[list[int]] = [[] for _ in tensors]
        for chunk in layout.chunks:
            for index in chunk.parameters:
                self._chunks_of[index].append(chunk.index)
        self._begin()

    def chunks_of(self, index: int) -> list[int]:
        """The chunks that hold parts of a tensor."""
        return self._chunks_of[index]

    def take(self, index: int, gradient: Tensor, *, hold: bool = False, mean: bool = False) -> None:
        """The gradient of a tensor is made: submit the chunks that it completes."""
        if gradient.is_sparse:
            raise ExchangeError(f"{self._names[index]} has a sparse gradient; chunks are dense.")
        self.made.add(index)
        self._rows[index] = as_row(gradient, self._tensors[index])
        complete = []
        for chunk in self._chunks_of[index]:
            self._open[chunk] -= 1
            if self._open[chunk] == 0:
                complete.append(chunk)
        self._submit(complete, hold, mean)
        for neighbour in {i for chunk in complete for i in self._layout.chunks[chunk].parameters}:
            if not any(self._open[chunk] for chunk in self._chunks_of[neighbour]):
                self._rows.pop(neighbour, None)  # all of it is on its way

    def cut(self, recorded: Sequence[Made], *, hold: bool) -> "list[Stretch] | None":
        """Cut the gradients of recorded passes, once for all steps: they come in the same order and
        lie in the same memory in each. None where they do not lie as their tensors do."""
        rows: dict[int, Tensor] = {}
        open_parts = [len(chunk.parameters) for chunk in self._layout.chunks]
        stretches: list[Stretch] = []
        for gradients, moment in recorded:
            complete = []
            for index, gradient in gradients:
                rows[index] = row = as_row(gradient, self._tensors[index])
                if row.data_ptr() != gradient.data_ptr():
                    return None
                for chunk in self._chunks_of[index]:
                    open_parts[chunk] -= 1
                    if open_parts[chunk] == 0:
                        complete.append(chunk)
            if gradients is recorded[-1][0]:
                complete += [chunk for chunk, parts in enumerate(open_parts) if parts > 0]
            stretches.append((self._ready(complete, rows, hold, mean=False), moment))
        return stretches

    def replay(self, indices: Iterable[int], stretches: "Sequence[Stretch]") -> None:
        """Submit all that was cut: recorded passes are about to make it."""
        self.made.update(indices)
        self._open = [0] * len(self._layout.chunks)
        for ready, moment in stretches:
            if ready:
                self._worker.submit(ready, moment)

    def finish(self, *, hold: bool = False, mean: bool = False) -> None:
        """Submit the chunks that lack a gradient; the next step may begin."""
        self._submit([c for c, parts in enumerate(self._open) if parts > 0], hold, mean)
        self._begin()

    def has_submitted(self, index: int) -> bool:
        """Some of a tensor's chunks are already on their way in this step."""
        return bool(self.made) and any(self._open[c] == 0 for c in self._chunks_of[index])

    def _begin(self) -> None:
        self.made: set[int] = set()
        """Tensors whose gradients were taken in this step."""
        self._rows: dict[int, Tensor] = {}
        self._open = [len(chunk.parameters) for chunk in self._layout.chunks]

    def _submit(self, chunks: Sequence[int], hold: bool, mean: bool) -> None:
        ready = self._ready(chunks, self._rows, hold, mean)
        if ready:
            self._worker.submit(ready)

    def _ready(
        self, chunks: Sequence[int], rows: dict[int, Tensor], hold: bool, mean: bool
    ) -> list[tuple[Ready, list[Piece]]]:
        ready: list[tuple[Ready, list[Piece]]] = []
        weight = self._weight()
        for chunk in chunks:
            facts = self._layout.chunks[chunk]
            pieces = pieces_of(facts, self._layout, rows)
            absent = tuple(index for index in facts.parameters if index not in rows)
            event = Ready(chunk, not pieces, absent, hold, mean, weight)
            ready.append((event, pieces))
        return ready
