"""`hybrid`: gradients are summed inside each host through shared memory, between hosts by leaders.

The members of a host (those whose identity names the same one) lay their gradients into memory they
all see; each sums its own stretch of every bucket (`host_sums.py`). The first member leads: it
alone exchanges the host's sums with the other leaders, by `ring` (gloo) or through servers, so that
what crosses the network does not grow with the members of a host.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from torch import Tensor

from paceline import spec
from paceline.architectures.hybrid.host_sums import Between, HostCollective
from paceline.architectures.hybrid.view_hosts import ViewHosts
from paceline.architectures.server import serve as serve_leaders
from paceline.autograd.averaging import BucketedArchitecture
from paceline.autograd.buckets import Bucket, BucketSize
from paceline.collectives.collective import TorchCollective
from paceline.collectives.context import Context
from paceline.collectives.notes import Meeting
from paceline.protocol.buckets import HYBRID_BUCKET_BYTES as BUCKET_BYTES
from paceline.protocol.collectives import hosts_of
from paceline.served.means import ServersCollective


class HybridArchitecture(BucketedArchitecture):
    """Shared memory inside a host, one leader per host outside."""

    def __init__(self, options: spec.Hybrid, context: Context) -> None:
        self._sums = _sums(options, context)
        super().__init__(self._sums, context, bucket_bytes=BUCKET_BYTES, allocate=self._lay_out)

    def _lay_out(self, sizes: Sequence[BucketSize]) -> list[Tensor]:
        """Make memory that the host shares, and find the others'."""
        self._sums.forget()
        flats = [self._sums.allocate_bucket(s.elements, s.dtype, s.device) for s in sizes]
        self._sums.connect()
        return flats

    def _begin(self) -> None:
        """Behind a loss buckets are dealt anew, for those with whom they are summed."""
        if not self._has_begun and self._sums.is_outdated:
            self._deal()
        super()._begin()

    def _part_with(self, bucket: Bucket) -> None:
        self._move_means(bucket)

    def counters(self) -> dict[str, object]:
        return self._sums.counters()


def serve(options: spec.Hybrid, context: Context) -> dict[str, object]:
    """A server member: to it the leaders are the workers."""
    if options.serving is None:
        context.note(f"{context.identity.name} has nothing to do: between = ring needs no servers.")
        return {}
    hosts = _hosts(Meeting(context), context.identity.workers)
    if len(hosts) == 1:
        context.note(f"{context.identity.name} has nothing to do: all workers share one host.")
        return {}
    return serve_leaders(options.serving, _among_leaders(context, hosts))


class RingSums(TorchCollective):
    """Sums over the leaders by gloo."""

    def deal(self, flats: Sequence[Tensor]) -> None:
        pass


def _sums(options: spec.Hybrid, context: Context) -> HostCollective | ViewHosts:
    identity = context.identity
    if context.views is not None:
        return ViewHosts(context, context.views, lambda hosts: _among(options, context, hosts))
    meeting = Meeting(context)
    meeting.leave(f"hybrid/host/{identity.rank}", identity.host)
    hosts = _hosts(meeting, identity.workers)
    return HostCollective(context, meeting, hosts, lambda: _among(options, context, hosts))


def _among(
    options: spec.Hybrid, context: Context, hosts: Sequence[Sequence[int]]
) -> Between | None:
    """A leader's way to the others."""
    if len(hosts) == 1:
        return None
    if options.serving is None:
        return RingSums(context, "gloo", [mates[0] for mates in hosts])
    return ServersCollective(options.serving, _among_leaders(context, hosts), sums=True)


def _hosts(meeting: Meeting, workers: int) -> list[list[int]]:
    """The workers of each host, as all have said where they are."""
    return hosts_of(meeting.read(f"hybrid/host/{n}", str, f"worker{n}") for n in range(workers))


def _among_leaders(context: Context, hosts: Sequence[Sequence[int]]) -> Context:
    """The job as leaders and servers see it: one worker per host."""
    identity = context.identity
    index = len(hosts) + identity.rank
    if identity.role == "worker":
        index = next(number for number, mates in enumerate(hosts) if identity.rank in mates)
    reduced = msgspec.structs.replace(
        identity, index=index, workers=len(hosts), local_index=0, local_members=1
    )
    return replace(context, identity=reduced)
