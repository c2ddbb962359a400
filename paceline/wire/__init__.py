"""How messages move: sockets, shared memory, keys. What they mean is the protocol's affair."""

from paceline.wire.keys import JobKey
from paceline.wire.mailbox import Parcel, Post
from paceline.wire.segment import Segment, Ticket
from paceline.wire.store import StoreClient, StoreKeeper
from paceline.wire.stream import StreamPost
from paceline.wire.zeromq import ZeroMqPost

__all__ = [
    "JobKey",
    "Parcel",
    "Post",
    "Segment",
    "StoreClient",
    "StoreKeeper",
    "StreamPost",
    "Ticket",
    "ZeroMqPost",
]
