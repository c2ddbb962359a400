"""`ring`: synchronous all-reduce of gradients, bucketed and overlapped with backward."""

from paceline import spec
from paceline.architectures.base import Architecture
from paceline.autograd.averaging import BucketedArchitecture
from paceline.collectives.collective import connect
from paceline.collectives.context import Context
from paceline.protocol.buckets import RING_BUCKET_BYTES


def build(options: spec.Ring, context: Context) -> Architecture:
    """Every worker sends to the next, over gloo, NCCL or MPI; nobody serves."""
    collective = connect(context, options.backend)
    bucket_bytes = options.piece_bytes or RING_BUCKET_BYTES
    return BucketedArchitecture(collective, context, bucket_bytes=bucket_bytes)
