"""How messages move: sockets, shared memory, keys. What they mean is the protocol's affair."""

from paceline.wire.keys import JobKey
from paceline.wire.post import Parcel, Post
from paceline.wire.segment import Segment, Ticket

__all__ = ["JobKey", "Parcel", "Post", "Segment", "Ticket"]
