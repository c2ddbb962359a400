"""How gradients are put together into buckets: one rule for those who train and who predict."""

from collections.abc import Hashable, Iterable, Iterator

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the exchange starts early."""

RING_BUCKET_BYTES = 25 << 20
"""Where the user leaves it to us: as large as in torch's own DistributedDataParallel."""

HYBRID_BUCKET_BYTES = 4 << 20
"""Small enough that summing in a host starts early in backward, large enough that flags cost
nothing."""

SERVER_BUCKET_BYTES = 1 << 20
"""Several chunks of a network; servers begin to sum early in backward."""


def filled(
    sizes: Iterable[tuple[int, Hashable]], first_bytes: int, bucket_bytes: int
) -> Iterator[list[int]]:
    """The numbers of the gradients in each bucket, in the order in which backward makes them.

    `sizes`: bytes of each, and its kind; a bucket holds one kind. It is full with the gradient that
    brings it to its limit, and leaves with that: a large one must not wait for what comes after.
    """
    bucket: list[int] = []
    size_bytes, limit_bytes, before = 0, first_bytes, None
    for number, (own_bytes, kind) in enumerate(sizes):
        if bucket and (size_bytes >= limit_bytes or kind != before):
            yield bucket
            bucket, size_bytes, limit_bytes = [], 0, bucket_bytes
        bucket.append(number)
        size_bytes, before = size_bytes + own_bytes, kind
    if bucket:
        yield bucket
