"""A collective over gloo that outlives workers that are lost (`on_loss = "continue"`).

gloo itself cannot: whoever sends to the lost one gets an error, the others wait for ever, and the
group is of no use afterwards. So the broken group is left behind with all that was started in it,
in buffers that nobody looks at again, and those who are left make a new one (decision 0145).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.collectives.context import Context
from paceline.collectives.crew import Crew, Kept, MemberLost
from paceline.collectives.group import Group, Operation, ended_early, missing_at, ran_out
from paceline.protocol.regrouping import Regroup

ROUNDING = 1e-6


class Regrouped(Exception):  # noqa: N818 - a turn of events
    """Workers were lost, and what was started is void: start it again from the values as they were,
    in other buffers."""


@dataclass(frozen=True, slots=True)
class _Started:
    flat: Tensor
    regroupings: int
    operation: Operation | None
    """None where somebody was lost before it could be started."""


class ElasticCollective:
    """Those workers that are there. The same face as `TorchCollective`, but `finish` may raise
    `Regrouped`."""

    def __init__(self, context: Context, crew: Crew) -> None:
        self.weight = float(len(crew.members))
        self.summed = len(crew.members)
        self._context, self._crew = context, crew
        self._group: Group | None = None
        self._regroupings = -1
        self._started: list[_Started] = []

    @property
    def members(self) -> tuple[int, ...]:
        return self._crew.members

    def broadcast(self, flat: Tensor) -> None:
        """A sum in which the first has the only values: it ends when all have entered it, where a
        broadcast would let the first run ahead of the rest."""
        own = flat.clone().view(torch.uint8)
        while True:
            leads = self._context.identity.rank == self.members[0]
            total = own.clone() if leads else torch.zeros_like(own)
            self.start(total)
            try:
                self.finish()
            except Regrouped:
                continue
            flat.copy_(total.view(flat.dtype))
            return

    def start(self, flat: Tensor) -> None:
        regroupings = self._crew.regroupings
        try:
            operation = self._begin(flat)
        except MemberLost:
            operation = None
        self._started.append(_Started(flat, regroupings, operation))

    def finish(self, *, keeps: Sequence[Tensor] | None = None) -> None:
        """`keeps`: the caller has these sums until the next exchange ends, and tells by `keep`;
        what is not summed but handed over with them, where that happens."""
        if not self._started:
            return  # no exchange: nobody would wait for anybody
        crew, weight = (
            self._crew,
            torch.tensor([self._context.training.weight()], dtype=torch.float64),
        )
        flats = [one.flat for one in self._started]
        if crew.regroupings:  # one may have been lost with an uneven part of a batch
            self.start(weight)
        started, self._started = self._started, []
        if any(one.regroupings != crew.regroupings for one in started):
            raise Regrouped
        try:
            for one in started:
                if one.operation is None:
                    raise MemberLost
                one.operation.wait()
        except MemberLost:
            self._mend([*flats, *(keeps or ())], keeps is not None)
            return
        except RuntimeError as error:
            if not ran_out(error):
                raise
            raise missing_at(self._context, f"exchange {crew.turn}", crew.members) from error
        count = len(crew.members)
        total = float(weight) if crew.regroupings else float(count)
        self.weight = float(count) if abs(total - count) < ROUNDING else total
        self._end_turn(flats, count, keeps is not None)

    def keep(self, kept: Kept) -> None:
        """Where the sums of the last exchange are to be found (see `finish`)."""
        self._crew.kept = kept

    def close(self) -> None:
        """Groups end with the process."""

    def _begin(self, flat: Tensor) -> Operation:
        return self._current().all_reduce(flat)

    def _current(self) -> Group:
        """The group of those who are there; made by all of them at their next exchange."""
        if self._group is None or self._regroupings != self._crew.regroupings:
            self._group, self._regroupings = None, self._crew.regroupings
            self._group = Group(self._context, "gloo", self._crew.members)
        return self._group

    def _end_turn(self, flats: Sequence[Tensor], count: int, keeps: bool) -> None:
        crew = self._crew
        crew.turn += 1
        crew.summed = self.summed = count
        crew.trained_samples = self._context.training.progress().samples
        if not keeps:
            copies = [flat.clone() for flat in flats]
            crew.kept = lambda: copies

    def _mend(self, flats: Sequence[Tensor], keeps: bool) -> None:
        """Agree with those who are left. Returns where the sums are there after all: one who had
        ended this exchange has handed them over."""
        regroup = mend(self._context, self._crew, flats)
        if self._context.identity.rank in regroup.behind:
            self.weight = 1.0  # what is kept of gradients is their mean
            self._end_turn(flats, regroup.summed, keeps)
            return
        if regroup.done:
            ended = {f"worker{rank}": self._crew.turn for rank in regroup.done}
            raise ended_early(
                self._context.membership.ended() or ended, self._context.identity.name
            )
        raise Regrouped


def mend(context: Context, crew: Crew, flats: Sequence[Tensor]) -> Regroup:
    """Agree with those who are left, and hand over what some lack: into `flats` where this is one
    of them. More may be lost meanwhile."""
    while True:
        with contextlib.suppress(MemberLost):
            regroup = crew.regroup(context.training.progress())
            context.membership.regrouped(regroup)
            hand_over(context, crew, regroup, flats)
            return regroup


def hand_over(context: Context, crew: Crew, regroup: Regroup, flats: Sequence[Tensor]) -> None:
    """From the source to those behind; the others have no part in it."""
    members = tuple(sorted((regroup.source, *regroup.behind)))
    rank = context.identity.rank
    if not regroup.behind or rank not in members:
        return
    # Not the store of one call of `distribute`: who is done has none.
    group = Group(replace(context, store=crew.store, crew=crew), "gloo", members)
    kept = crew.kept() if rank == regroup.source else flats
    assert kept is not None, "the source has said that it keeps them"
    for flat in kept:
        group.broadcast(flat, members.index(regroup.source))
