"""Whether the workers' Keras variables are still alike, and who changed them alone.

Keras holds the weights; the mirror that torch exchanges has no others to compare. In a look each
worker tells a digest of some variables and sees everybody's: in each of the first steps and in one
of sixteen later. Who assigns to a variable outside the optimizer says so with its next gradients:
then all look at every variable, before that step is applied.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from paceline.autograd.divergence import STRETCH, is_looked_at, tolerance
from paceline.errors import ExchangeError
from paceline.session.session import Session
from paceline.tensorflow.mirror import Array
from paceline.tensorflow.passes import hook

LOOKED_AT = 8
"""Variables of one look, a stretch of each; the next look is at others."""

PIECE = 1 << 20
"""Elements that are summed at a time."""

FIX = (
    "Do the same on every worker, or before paceline.tensorflow.distribute, which gives all "
    "worker 0's."
)


class Likeness:
    """One worker's part in the looks at one model's trained variables."""

    def __init__(self, session: Session, variables: Sequence[Any]) -> None:
        self._session, self._variables = session, list(variables)
        self._looks = 0
        self._is_ours = False
        self._assigned: tuple[int, int] | None = None
        """Variable and step of the first assignment that was not the optimizer's."""
        for number, variable in enumerate(self._variables):
            variable.__dict__.pop("assign", None)  # distributed before, with another optimizer
            hook(variable, "assign", self._noting(number))

    @property
    def assigned(self) -> str:
        """What this worker's script assigned to since the last look at everything."""
        return "" if self._assigned is None else str(self._variables[self._assigned[0]].path)

    @contextmanager
    def ours(self) -> Iterator[None]:
        """What is assigned meanwhile is the optimizer's or the exchange's."""
        before, self._is_ours = self._is_ours, True
        try:
            yield
        finally:
            self._is_ours = before

    def look(self, *, at_all: bool = False) -> None:
        """Raise where workers differ; all of them call it at the same point, in the same way.

        The mean is over those who began: where others go on without one of them, nobody looks.
        """
        if self._session.workers == 1 or self._session.identity.goes_on:
            return
        if not at_all and not is_looked_at(self._session.step):
            return
        if at_all:
            looked = [(variable, _values(variable)) for variable in self._variables]
        else:
            turn, window = divmod(self._looks, -(-len(self._variables) // LOOKED_AT))
            chosen = self._variables[window * LOOKED_AT :][:LOOKED_AT]
            looked = [(variable, _stretch(variable, turn)) for variable in chosen]
            self._looks += 1
        self._compare([v for v, _ in looked], np.array([_digest(values) for _, values in looked]))
        if at_all:
            self._assigned = None

    def _noting(self, number: int) -> Any:
        def assign(original: Any, value: Any) -> Any:
            if not self._is_ours and tf.executing_eagerly() and self._assigned is None:
                self._assigned = (number, self._session.step)
            return original(value)

        return assign

    def _compare(self, variables: Sequence[Any], digests: Array) -> None:
        """Every worker's digests, a row for each, are in one table on all of them."""
        session = self._session
        told = torch.zeros(session.workers, 1 + digests.size, dtype=torch.float64)
        told[session.rank, 0] = 0 if self._assigned is None else self._assigned[1] + 1
        told[session.rank, 1:] = torch.from_numpy(digests.ravel())
        table = session.group.mean(told).numpy() * session.workers
        steps, values, sizes = table[:, 0], table[:, 1::2], table[:, 2::2]
        bounds = sizes.max(0) * [
            tolerance(getattr(torch, variable.dtype)) for variable in variables
        ]
        is_other = np.abs(values - np.median(values, 0)) > bounds / 2
        if not is_other.any():
            return
        number = int(is_other.any(0).argmax())
        odd = np.flatnonzero(is_other[:, number])
        assigned = [(int(rank), round(steps[rank]) - 1) for rank in np.flatnonzero(steps)]
        alone = [int(rank) for rank in odd] if 2 * len(odd) < session.workers else []
        raise ExchangeError(self._words(variables[number].path, assigned, alone))

    def _words(self, path: str, assigned: list[tuple[int, int]], alone: list[int]) -> str:
        now = f"the workers' weights have become different: {path} in step {self._session.step}. "
        if assigned:
            told = [f"worker{rank} before step {step}" for rank, step in assigned]
            return f"{now}Assigned to outside the optimizer: by {' and '.join(told)}. {FIX}"
        if alone:
            names = ", ".join(f"worker{rank}" for rank in alone)
            return f"{now}Those of {names} are other than all the others'. {FIX}"
        return f"{now}One of them changed its weights or its optimizer alone. {FIX}"


def _values(variable: Any) -> Array:
    """Where they lie: nobody writes to them while workers look."""
    return np.asarray(variable.value.value()).reshape(-1)


def _stretch(variable: Any, turn: int) -> Array:
    """Another one in each turn."""
    values = _values(variable)
    first = turn * STRETCH % max(1, values.size)
    return values[first : first + STRETCH]


def _digest(values: Array) -> tuple[float, float]:
    """A mean in which places count differently, and the mean magnitude."""
    total = size = 0.0
    for first in range(0, values.size, PIECE):
        piece = values[first : first + PIECE].astype(np.float64)
        total += float(piece @ np.linspace(0.5, 1.5, piece.size))
        size += float(np.abs(piece).sum())
    return total / max(1, values.size), size / max(1, values.size)
