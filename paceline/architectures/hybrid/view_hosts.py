"""`hybrid` that outlives workers that are lost (`on_loss = "continue"`).

What a host sums lies in memory that the failed worker could see and may have written to, and the
failed worker may be the leader of its host. So the participants of the next view share other
memory, with other leaders if need be, and make the interrupted step again there.

Two sides in turn: the memory of one has the means of the last step, for one who lacks them, while
gradients of this one are summed in the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from paceline.architectures.hybrid.host_sums import Between, HostCollective
from paceline.collectives.context import Context
from paceline.collectives.group import Operation, watched
from paceline.collectives.notes import Meeting
from paceline.collectives.view_collective import ViewCollective
from paceline.collectives.views import ViewChanged, Views
from paceline.protocol.collectives import hosts_of

SIDES = 2
Hosts = Sequence[Sequence[int]]


class ViewHosts(ViewCollective):
    """Those workers that are there: sums inside their hosts, then over the leaders."""

    def __init__(
        self, context: Context, views: Views, between: Callable[[Hosts], Between | None]
    ) -> None:
        """`between` joins a leader to those of the other hosts."""
        super().__init__(context, views)
        self._join, self._between = between, list[Between | None]()
        self._sides: list[HostCollective] = []
        self._side_of: dict[int, HostCollective] = {}
        """By the address of a bucket's memory."""
        self._summing: HostCollective | None = None
        self._dealt_in = self._connections = 0
        self._is_connected = False
        self._left_behind: list[HostCollective] = []
        """Sides of former buckets, for what they have counted."""

    @property
    def is_outdated(self) -> bool:
        """The participants have changed since buckets were dealt."""
        return self._dealt_in != self._views.changes

    def allocate_bucket(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called for each bucket's memory on one side and on the other."""
        side = self._sides[len(self._side_of) % SIDES]
        flat = side.allocate_bucket(elements, dtype, device)
        self._side_of[flat.data_ptr()] = side
        return flat

    def forget(self) -> None:
        """Other buckets will take the place of these, for those who are there now."""
        for side in self._sides:
            side.close()
        self._left_behind += self._sides
        if self.is_outdated:
            self._connections, self._between = 0, []
        self._dealt_in, self._is_connected, self._summing = self._views.changes, False, None
        view = self._views.view
        mates = hosts_of(view.hosts)
        hosts = tuple(tuple(view.participants[place] for place in places) for places in mates)
        self._side_of = {}
        self._sides = [
            HostCollective(
                self._context,
                Meeting(replace(self._context, store=self._store_of(number))),
                hosts,
                lambda: self._joined(hosts),
                _Everyone(self),
            )
            for number in range(SIDES)
        ]

    def connect(self) -> None:
        """The others' memory is found at the next exchange, which all who are there take part in:
        some may have to be handed the last one first."""

    def counters(self) -> dict[str, object]:
        """As `HostCollective` has it, over all who were there in turn."""
        counted: dict[str, object] = {}
        for side in (*self._left_behind, *self._sides):
            for name, value in side.counters().items():
                before = counted.get(name, 0) if name.startswith("exchanged_") else 0
                assert isinstance(before, int)
                assert isinstance(value, int)
                counted[name] = before + value
        return counted

    def close(self) -> None:
        for side in self._sides:
            side.close()
        super().close()

    def _begin(self, flat: Tensor) -> Operation:
        side = self._side_of.get(flat.data_ptr())
        if side is None:
            return super()._begin(flat)
        if self._views.must_stop:
            raise ViewChanged
        if not self._is_connected:
            self._connect()
        self._summing = side
        side.start(flat)
        return Operation(self._finish_side, side)

    def _finish_side(self, side: HostCollective) -> None:
        """All buckets of a step end together."""
        if self._summing is side:
            self._summing = None
            side.finish()

    def _connect(self) -> None:
        self._current()
        for side in self._sides:
            watched(side.connect, self._context)
        self._connections += 1
        self._is_connected = True

    def _joined(self, hosts: Hosts) -> Between | None:
        """Both sides exchange over one group."""
        if not self._between:
            self._between.append(self._join(hosts))
        return self._between[0]

    def _store_of(self, side: int) -> PrefixStore | None:
        """One for each time that the same workers find each other's memory."""
        if self._context.store is None:
            return None
        number = self._views.view.number
        return PrefixStore(f"hosts/{number}/{self._connections}/{side}", self._context.store)


class _Everyone:
    """The group of those who are there, as a host's members need it to meet."""

    def __init__(self, hosts: ViewHosts) -> None:
        self._hosts = hosts
        self._started: list[Operation] = []

    def broadcast(self, flat: Tensor) -> None:
        self._hosts.broadcast(flat)

    def start(self, flat: Tensor) -> None:
        self._started.append(self._hosts._current().all_reduce(flat))

    def finish(self) -> None:
        started, self._started = self._started, []
        for operation in started:
            operation.wait()
