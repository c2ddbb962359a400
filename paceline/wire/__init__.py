"""How messages move: one authenticated channel over sockets, and shared memory.

What the messages mean is the protocol's affair; `README.md` says which file holds what.
"""

from paceline.wire.blocking import BlockingChannel
from paceline.wire.keys import JobKey
from paceline.wire.listener import ChannelListener
from paceline.wire.mailbox import Closed, Mailbox, Packet
from paceline.wire.segment import Segment, Ticket
from paceline.wire.store import StoreClient, StoreKeeper

__all__ = [
    "BlockingChannel",
    "ChannelListener",
    "Closed",
    "JobKey",
    "Mailbox",
    "Packet",
    "Segment",
    "StoreClient",
    "StoreKeeper",
    "Ticket",
]
