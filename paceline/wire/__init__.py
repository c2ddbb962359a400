"""How messages move: one authenticated channel over sockets, and shared memory.

What the messages mean is the protocol's affair; `README.md` says which file holds what.
"""

from paceline.wire.blocking import BlockingChannel
from paceline.wire.keys import JobKey
from paceline.wire.listener import Listener
from paceline.wire.mailbox import Closed, Mailbox, Packet
from paceline.wire.segment import Segment, Ticket
from paceline.wire.store import StoreClient, StoreKeeper

__all__ = [
    "BlockingChannel",
    "Closed",
    "JobKey",
    "Listener",
    "Mailbox",
    "Packet",
    "Segment",
    "StoreClient",
    "StoreKeeper",
    "Ticket",
]
