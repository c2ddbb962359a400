"""Who holds which stage and which weights, and the groups in which they talk."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline import spec
from paceline.collectives.context import Context
from paceline.collectives.group import kept
from paceline.collectives.proof import proven
from paceline.compute.units import Unit, UnitChain
from paceline.protocol.pipeline import Pipe
from paceline.wire.gloo_ports import shut_behind


class Places:
    """Who holds which stage of which pipeline: pipelines are runs of consecutive ranks."""

    def __init__(self, options: spec.Pipeline, workers: int, rank: int) -> None:
        self.replicas = options.replicas
        self.pipe = Pipe.of(options, workers)
        """Each of them."""
        self.replica, self.place = divmod(rank, self.pipe.workers)
        self.last_rank = self.ranks(self.replica)[-1]

    def ranks(self, replica: int) -> range:
        """The workers of one of the pipelines."""
        return range(replica * self.pipe.workers, (replica + 1) * self.pipe.workers)


class Groups:
    """Process groups; every worker makes all of them, in one order."""

    def __init__(self, context: Context, places: Places, owners: dict[str, list[int]]) -> None:
        self._context, self._made = context, 0
        pipes = [self._new(list(places.ranks(r))) for r in range(places.replicas)]
        self.pipe = pipes[places.replica]
        self.twins = None
        if places.replicas > 1:
            columns = [
                self._new([places.ranks(r)[place] for r in range(places.replicas)])
                for place in range(places.pipe.workers)
            ]
            self.twins = columns[places.place]
        self.ties: dict[str, tuple[Any, int]] = {}
        """Name of a weight that several workers hold -> their group, and the first of them."""
        for name, own in sorted(owners.items()):
            for replica in range(places.replicas):
                group = self._new([places.ranks(replica)[place] for place in own])
                if replica == places.replica:
                    self.ties[name] = (group, own[0])

    def _new(self, ranks: list[int]) -> Any:
        """A group that no stranger has a place in, and that nobody can call at any more."""
        self._made += 1
        if dist.get_backend() != "gloo":
            return dist.new_group(ranks)
        assert self._context.store is not None, "a pipeline has several workers"
        with shut_behind():
            if self._context.identity.rank not in ranks or len(ranks) == 1:
                return dist.new_group(ranks)
            store = PrefixStore(f"pipeline/proof{self._made}", self._context.store)
            # Every worker takes part in making each group: not again for those inside alone.
            return proven(self._context, store, ranks, lambda _: dist.new_group(ranks), kept, 1)


def names_of(rows: Sequence[Sequence[Unit]]) -> dict[int, str]:
    """Identity of each weight -> its first name in the model."""
    names: dict[int, str] = {}
    for units in rows:
        for name, parameter in UnitChain(units).named_in_model():
            names.setdefault(id(parameter), name)
    return names


def owners_of(
    rows: Sequence[Sequence[Unit]], names: dict[int, str], places: Places
) -> dict[str, list[int]]:
    """Weights that lie on several workers -> the places of these."""
    found: dict[str, set[int]] = {}
    for stage, units in enumerate(rows):
        for _, parameter in UnitChain(units).named_in_model():
            found.setdefault(names[id(parameter)], set()).add(places.pipe.owner(stage))
    return {name: sorted(own) for name, own in found.items() if len(own) > 1}
