"""What averaging needs of the workers as a group: worker 0's values, and sums over all.

`TorchCollective` is gloo or NCCL; `mpi.MpiCollective` has the same face. What is summed is always
one flat tensor of one type: `Packed` packs many into one and out again.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.collectives import group
from paceline.collectives.context import Context
from paceline.collectives.group import Group, Operation, missing_at, ran_out
from paceline.collectives.view_collective import ViewCollective
from paceline.errors import SpecError


class Collective(Protocol):
    """One worker's hold on the group. All workers make the same calls in the same order."""

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the workers whose values are summed."""

    weight: float
    """What the last sums must be divided by for a mean.

    The number of members, unless one was lost in that very step with an uneven part of the batch;
    1 if the collective makes means by itself.
    """

    @property
    def counts_equally(self) -> bool:
        """Every member counted alike in the last sum: a value that all have comes out as it was."""

    @property
    def summed(self) -> int:
        """How many workers' values the last sum was made of."""

    def broadcast(self, flat: Tensor) -> None:
        """Overwrite `flat` with that of the first of the members."""

    def start(self, flat: Tensor) -> None:
        """Begin to replace `flat` by its sum over the workers; nobody touches it meanwhile."""

    def finish(self) -> None:
        """Wait until every sum that was started is there."""

    def close(self) -> None:
        """Leave the group; returns within seconds."""


class TorchCollective:
    """gloo between CPUs, NCCL between GPUs."""

    counts_equally = True

    def __init__(
        self, context: Context, backend: str, members: Sequence[int] | None = None
    ) -> None:
        """Made by all `members` at once; by every worker when they are left out."""
        self._group = Group(context, backend, members)
        self.members = self._group.members
        self.summed = len(self.members)
        self.weight = float(self.summed)
        self._context = context
        self._started: list[Operation] = []
        self._rounds = 0

    def broadcast(self, flat: Tensor) -> None:
        self._group.broadcast(flat)

    def start(self, flat: Tensor) -> None:
        self._started.append(self._group.all_reduce(flat))

    def finish(self) -> None:
        started, self._started = self._started, []
        self._rounds += 1
        try:
            for operation in started:
                operation.wait()
        except RuntimeError as error:
            if not ran_out(error):
                raise
            raise missing_at(self._context, f"all-reduce {self._rounds}", self.members) from error

    def close(self) -> None:
        """The group's threads and sockets end with the process."""


def connect(context: Context, backend: str) -> Collective:
    """Join the group of all workers over `backend` ("auto", "gloo", "nccl" or "mpi")."""
    chosen = group.backend_for(context, backend)
    if context.identity.goes_on and not group.goes_on(chosen):
        problem = f"workers that exchange over {chosen} cannot go on without one of them."
        fix = "write backend=gloo, or --on-loss stop and --restarts to start again."
        raise SpecError("--on-loss", problem, fix)
    if chosen == "mpi":
        from paceline.collectives.mpi import MpiCollective  # an extra: loaded when asked for

        return MpiCollective(context)
    if context.views is not None:
        return ViewCollective(context, context.views)
    return TorchCollective(context, chosen)


class Packed:
    """One type's tensors, packed end to end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        first = self.tensors[0]
        self.buffer = torch.empty(
            sum(t.numel() for t in self.tensors), dtype=first.dtype, device=first.device
        )
        self._places = _places(self.buffer, self.tensors)

    @property
    def size_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def renew(self) -> None:
        """Take other memory: somebody may still write to this."""
        self.buffer = torch.empty_like(self.buffer)
        self._places = _places(self.buffer, self.tensors)

    def pack(self) -> Tensor:
        """Copy the tensors' values in; returns the buffer."""
        for place, tensor in zip(self._places, self.tensors, strict=True):
            place.copy_(tensor)
        return self.buffer

    def unpack(self, values: Tensor | None = None) -> None:
        """Overwrite the tensors by `values` (the buffer's own when left out)."""
        places = self._places if values is None else _places(values, self.tensors)
        for place, tensor in zip(places, self.tensors, strict=True):
            tensor.copy_(place)

    def add(self, values: Tensor) -> None:
        """Add `values` to the tensors."""
        for place, tensor in zip(_places(values, self.tensors), self.tensors, strict=True):
            tensor.add_(place)


def flatten(tensors: Iterable[Tensor]) -> list[Packed]:
    """One `Packed` per type; tensors that hold no numbers to average are left out."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_type.setdefault(tensor.dtype, []).append(tensor)
    return [Packed(of_one_type) for of_one_type in by_type.values()]


def start_equal(collective: Collective, tensors: Iterable[Tensor]) -> None:
    """Give every worker worker 0's values of these tensors."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for of_one_kind in by_kind.values():
            flat = Packed(of_one_kind)
            collective.broadcast(flat.pack())
            flat.unpack()


def _places(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where each tensor lies in `buffer`, in its own order of dimensions."""
    places, offset = [], 0
    for tensor in tensors:
        place = buffer[offset : offset + tensor.numel()]
        places.append(place_like(place, tensor))
        offset += tensor.numel()
    return places


def place_like(flat: Tensor, tensor: Tensor) -> Tensor:
    """View `flat` with `tensor`'s shape, and its strides where they are dense (channels last)."""
    if _is_dense(tensor):
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    return flat.view(tensor.shape)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
