"""Handing batches over: what a batch counts, and whether the script trains on it.

The gradients that come next are scaled for the batch handed over last. Where that cannot be the
batch they were computed on, they are refused.
"""

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.autograd.scaling import ScaledGradients
from paceline.errors import SpecError
from paceline.session.distribution import Distribution
from paceline.session.join_obstacle import JoinObstacle
from paceline.session.loader.portions import Portion, Portions
from paceline.session.step_record import StepRecord


@dataclass(slots=True)
class _Handed:
    """A batch that the script was given with gradients enabled."""

    loader: int
    scale: float
    gradients: int
    """Number of gradients that had come before it."""

    in_training_mode: bool
    is_trained_on: bool = False
    is_over: bool = False
    """The pass has ended and the script has continued after it."""


class Ledger:
    """The batches of all sharded loaders of a process, in the order they were handed over."""

    def __init__(self, distribution: Distribution, obstacle: JoinObstacle) -> None:
        self._distribution, self._obstacle = distribution, obstacle
        self.latest: _Handed | None = None
        """The batch that the next gradients are taken to be of; None after the end of a pass."""
        self.is_spent = False
        """The next gradients could only be of a batch that is over, and was an uneven one."""
        self.num_loaders = 0
        self.is_needed = False
        """A loader has parts that may be uneven; where none has, gradients are not watched."""

    @property
    def gradients(self) -> ScaledGradients:
        """The gradients of all that is trained, which are counted and scaled."""
        return self._distribution.gradients

    @property
    def is_training(self) -> bool | None:
        """Return whether a distributed model is in training mode; None before there is one."""
        return self._distribution.is_training

    def look(self) -> None:
        """Note whether gradients came since the last batch."""
        if self.latest is not None and self.gradients.count > self.latest.gradients:
            self.latest.is_trained_on = True

    def hand(self, loader: int, scale: float) -> _Handed:
        """The next gradients are those of a batch that counts `scale`."""
        if self.is_needed:
            self.gradients.watch()
        last = self.latest
        handed = _Handed(loader, scale, self.gradients.count, bool(self.is_training))
        if last is not None and _are_mixed(last, handed):
            problem = (
                f"batches of two loaders were drawn one after the other, and their parts count "
                f"{last.scale:g} and {scale:g} on this worker: gradients have one scale."
            )
            fix = (
                "draw a batch that is not trained on inside torch.no_grad(); for two that are, "
                "call backward() for each before the next is drawn, or make all parts equal: "
                "drop_last=True and batches that divide by the number of workers."
            )
            raise SpecError("shard", problem, fix)
        self.latest, self.is_spent = handed, False
        self._obstacle.batches_are_divided = True
        self.gradients.scale_by(scale)
        return handed

    def show(self) -> None:
        """A batch that may count differently is drawn without gradients, hence not to be trained
        on. In evaluation mode, or while a batch to train on is out, nothing else is thinkable."""
        if self.latest is None and self.is_training:
            problem = "a batch was trained on that was drawn inside torch.no_grad()."
            fix = (
                "draw batches to train on outside of torch.no_grad(), which tells them from those "
                "to evaluate; and call model.eval() before an evaluation."
            )
            self.gradients.refuse(SpecError("shard", problem, fix))

    def end(self, handed: _Handed, before: "_Before", is_uneven: bool) -> None:
        """A pass is over: what was in force before it is so again."""
        handed.is_over = True
        if self.latest is not handed:
            return
        self.latest, self.is_spent = before.handed, before.is_spent
        if self.latest is not None and self.latest.is_over:
            self.latest = None
        if self.latest is not None:
            self.gradients.scale_by(self.latest.scale)
            return
        self.is_spent |= is_uneven
        self.gradients.scale_by(1.0)
        if self.is_spent:
            self.gradients.refuse(_replayed())


def _are_mixed(last: _Handed, now: _Handed) -> bool:
    if last.loader == now.loader or last.scale == now.scale or last.is_trained_on:
        return False
    return last.in_training_mode and now.in_training_mode


def _replayed() -> SpecError:
    problem = (
        "batches are kept and trained on again after their pass over the sharded loader has "
        "ended, and batches of this loader count differently."
    )
    fix = (
        "draw every batch when it is trained on: `while True: yield from loader` in place of "
        "itertools.cycle(loader), no list(loader), no reading ahead; or make all parts equal: "
        "drop_last=True and batches that divide by the number of workers."
    )
    return SpecError("shard", problem, fix)


@dataclass(frozen=True, slots=True)
class _Before:
    """The state when a pass began."""

    handed: _Handed | None
    is_spent: bool


@dataclass(slots=True)
class Use:
    """Use of a loader's batches by the script, as far as it is known."""

    number: int
    trains: bool | None = None
    is_cycled: bool | None = None


class Pass(Iterator[Any]):
    """Iterates one pass over a sharded loader for the script."""

    def __init__(
        self,
        portions: Iterator[Portion],
        source: Portions,
        steps: StepRecord,
        ledger: Ledger,
        use: Use,
        *,
        alone: bool,
    ) -> None:
        """`alone`: there is one worker, which gets all batches as they are."""
        self._portions, self._source = portions, source
        self._steps, self._ledger, self._use, self._alone = steps, ledger, use, alone
        self._before: _Before | None = None
        self._last: _Handed | None = None
        self._has_handed = self._is_trained_on = self._is_uneven = False

    def __len__(self) -> int:
        return len(self._source)

    def __next__(self) -> Any:
        clock = self._steps.clock
        while True:
            clock.enter("input")
            try:
                portion = next(self._portions)
            except StopIteration:
                self._end()
                raise
            finally:
                clock.enter("other")
            if self._alone or self._hand_over(portion):
                if self._ledger.is_training and torch.is_grad_enabled():
                    self._steps.samples.hand(portion.own)
                return portion.batch

    def _hand_over(self, portion: Portion) -> bool:
        """Return whether the script gets this portion: a stand-in is only for training."""
        if not torch.is_grad_enabled():
            if not self._source.is_even:
                self._ledger.show()
            return portion.own > 0
        self._look_back()
        if portion.own == 0 and not self._trains():
            return False
        if not self._source.is_even and self._use.is_cycled is None:
            self._use.is_cycled = self._is_cycled()
            if self._use.is_cycled:
                raise _replayed()
        self._has_handed = True
        if self._ledger.is_training is None:  # a look at the data before there is a model
            return True
        if self._before is None:
            self._before = _Before(self._ledger.latest, self._ledger.is_spent)
        self._last = self._ledger.hand(self._use.number, portion.scale)
        self._is_uneven |= portion.scale != 1.0
        return True

    def _is_cycled(self) -> bool:
        """Return whether itertools.cycle holds this pass. Only the first pass of a loader is looked
        at: it takes milliseconds, and saves a script from training for a pass before it is refused.
        """
        return any(isinstance(holder, itertools.cycle) for holder in gc.get_referrers(self))

    def _look_back(self) -> None:
        self._ledger.look()
        if self._last is None:
            return
        self._is_trained_on |= self._last.is_trained_on
        self._use.trains = self._is_trained_on
        if self._last.scale == 0.0 and self._ledger.gradients.count == self._last.gradients:
            problem = (
                "this worker had no sample in a batch and was given one that counts nothing, to "
                "take part in the step; but the script did not train on it."
            )
            fix = "iterate loaders that are not trained on inside torch.no_grad()."
            raise SpecError("shard", problem, fix)

    def _trains(self) -> bool:
        """Return whether the script trains on this pass, judging by what it did so far."""
        if self._is_trained_on:
            return True
        if self._has_handed:
            return False
        if self._use.trains is not None:
            return self._use.trains
        return self._ledger.is_training is not False

    def _end(self) -> None:
        if self._last is None or self._before is None:
            return
        self._look_back()
        self._ledger.end(self._last, self._before, self._is_uneven)
        self._last = None
