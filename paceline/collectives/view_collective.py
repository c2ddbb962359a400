"""A collective over gloo for workers that continue after a failure (`on_loss = "continue"`).

gloo itself cannot: whoever sends to the failed worker gets an error, the others wait for ever, and
the group is of no use afterwards. So the group of a view is left behind with all that was started
in it, in buffers that nothing reads again; the participants of the next view make a new group
(decision 0145).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.collectives.context import Context
from paceline.collectives.group import Group, Operation, ended_early, missing_at, ran_out
from paceline.collectives.views import Kept, ViewChanged, Views
from paceline.protocol.views import View

ROUNDING = 1e-6


class ExchangeVoid(Exception):  # noqa: N818 - a turn of events
    """Workers were lost, and what was started is void: start it again from the values as they were,
    in other buffers."""


@dataclass(frozen=True, slots=True)
class _Started:
    flat: Tensor
    changes: int
    operation: Operation | None
    """None where somebody was lost before it could be started."""


class ViewCollective:
    """Those workers that are there. The same face as `TorchCollective`, but `finish` may raise
    `ExchangeVoid`."""

    def __init__(self, context: Context, views: Views) -> None:
        self.weight = float(len(views.members))
        self.summed = len(views.members)
        self._context, self._views = context, views
        self._group: Group | None = None
        self._changes = -1
        self._started: list[_Started] = []

    @property
    def members(self) -> tuple[int, ...]:
        return self._views.members

    @property
    def counts_equally(self) -> bool:
        return self.weight == len(self.members)

    def broadcast(self, flat: Tensor) -> None:
        """A sum in which the first has the only values: it ends when all have entered it, where a
        broadcast would let the first run ahead of the rest."""
        if not self._views.has_state:  # it comes with the view that lets this worker join
            return
        own = flat.clone().view(torch.uint8)
        while True:
            leads = self._context.identity.rank == self.members[0]
            total = own.clone() if leads else torch.zeros_like(own)
            self.start(total)
            try:
                self.finish()
            except ExchangeVoid:
                continue
            flat.copy_(total.view(flat.dtype))
            return

    def start(self, flat: Tensor) -> None:
        changes = self._views.changes
        try:
            operation = self._begin(flat)
        except ViewChanged:
            operation = None
        self._started.append(_Started(flat, changes, operation))

    def finish(self, *, keeps: Sequence[Tensor] | None = None) -> None:
        """`keeps`: the caller has these sums until the next exchange ends, and tells by `keep`;
        what is not summed but handed over with them, where that happens."""
        if not self._started:
            return  # no exchange: nobody would wait for anybody
        views, beside = self._views, self._beside()
        flats = [one.flat for one in self._started]
        if views.changes:
            self.start(beside)
        started, self._started = self._started, []
        if any(one.changes != views.changes for one in started):
            raise ExchangeVoid
        try:
            for one in started:
                if one.operation is None:
                    raise ViewChanged
                one.operation.wait()
        except ViewChanged:
            self._mend([*flats, *(keeps or ())], keeps is not None)
            return
        except RuntimeError as error:
            if not ran_out(error):
                raise
            raise missing_at(self._context, f"exchange {views.exchanges}", views.members) from error
        count = len(views.members)
        total = float(beside[0]) if views.changes else float(count)
        self.weight = float(count) if abs(total - count) < ROUNDING else total
        if self._context.identity.has_joined:
            self._context.training.use_settings(beside[1:].tolist())
        self._end_exchange(flats, count, keeps is not None)

    def _beside(self) -> Tensor:
        """What is summed beside the values once participants have changed: what each part of the
        batch counts, for one may have failed with an uneven part; and the optimizers' settings of
        one initial worker, for a joined worker's own schedule began when it came."""
        training, identity = self._context.training, self._context.identity
        settings = training.settings()
        beside = torch.zeros(1 + len(settings), dtype=torch.float64)
        beside[0] = training.weight()
        if identity.rank == self.members[0] and not identity.has_joined:
            beside[1:] = torch.tensor(settings, dtype=torch.float64)
        return beside

    def keep(self, kept: Kept) -> None:
        """Where the sums of the last exchange are to be found (see `finish`)."""
        self._views.kept = kept

    def close(self) -> None:
        """Groups end with the process."""

    def _begin(self, flat: Tensor) -> Operation:
        return self._current().all_reduce(flat)

    def _current(self) -> Group:
        """The group of the view; made by all of its participants at their next exchange."""
        if self._group is None or self._changes != self._views.changes:
            self._group, self._changes = None, self._views.changes
            self._group = Group(self._context, "gloo", self._views.members)
        return self._group

    def _end_exchange(self, flats: Sequence[Tensor], count: int, keeps: bool) -> None:
        views = self._views
        views.exchanges += 1
        views.summed = self.summed = count
        views.trained_samples = self._context.training.progress().samples
        if not keeps:
            copies = [flat.clone() for flat in flats]
            views.kept = lambda: copies

    def _mend(self, flats: Sequence[Tensor], keeps: bool) -> None:
        """Take the next view. Returns if the sums exist after all: a participant that had ended
        this exchange has handed them over."""
        view = mend(self._context, self._views, flats)
        if self._context.identity.rank in view.behind:
            self.weight = 1.0  # what is kept of gradients is their mean
            self._end_exchange(flats, view.summed, keeps)
            return
        if view.done:
            ended = {f"worker{rank}": self._views.exchanges for rank in view.done}
            raise ended_early(
                self._context.membership.ended() or ended, self._context.identity.name
            )
        raise ExchangeVoid


def mend(context: Context, views: Views, flats: Sequence[Tensor]) -> View:
    """Take the next view, and hand over the result that some lack: into `flats` if this worker is
    one of them. Others may fail meanwhile."""
    while True:
        with contextlib.suppress(ViewChanged):
            view = views.next_view(context.training.progress())
            context.membership.view_changed(view)
            hand_over(context, views, view, flats)
            return view


def hand_over(context: Context, views: Views, view: View, flats: Sequence[Tensor]) -> None:
    """Give the last result from the source to the participants that lack it."""
    members = tuple(sorted((view.source, *view.behind)))
    rank = context.identity.rank
    if not view.behind or rank not in members:
        return
    # Not the store of one call of `distribute`: a worker that is done has none.
    group = Group(replace(context, store=views.store), "gloo", members)
    kept = views.kept() if rank == view.source else flats
    assert kept is not None, "the source has said that it keeps them"
    for flat in kept:
        group.broadcast(flat, members.index(view.source))
