"""How messages move: sockets, shared memory, keys. What they mean is the protocol's affair."""

from paceline.wire.keys import JobKey
from paceline.wire.mailbox import Mailbox, Packet
from paceline.wire.segment import Segment, Ticket
from paceline.wire.store import StoreClient, StoreKeeper
from paceline.wire.stream import StreamMailbox
from paceline.wire.zeromq import ZeroMqMailbox

__all__ = [
    "JobKey",
    "Mailbox",
    "Packet",
    "Segment",
    "StoreClient",
    "StoreKeeper",
    "StreamMailbox",
    "Ticket",
    "ZeroMqMailbox",
]
