"""Pure state machines of an exchange: chunks, placement, the worker's and the server's side.

Everything here is decisions: no torch, no sockets, no clock. The runtime feeds the machines from
the network, the predictor from a virtual one, tests by hand.
"""

from paceline.protocol.chunks import Chunk, Layout, ParameterSize
from paceline.protocol.membership import Membership, of_size
from paceline.protocol.messages import (
    Answer,
    Chosen,
    Commit,
    Declare,
    Join,
    Leave,
    Message,
    Pull,
    Push,
)
from paceline.protocol.placement import Seat, cut_and_deal, exchange_seconds, seats
from paceline.protocol.server import Announce, Drop, Keep, Measure, ServerMachine, Update
from paceline.protocol.worker import Departed, Ready, Send, Usable, WorkerMachine

__all__ = [
    "Announce",
    "Answer",
    "Chosen",
    "Chunk",
    "Commit",
    "Declare",
    "Departed",
    "Drop",
    "Join",
    "Keep",
    "Layout",
    "Leave",
    "Measure",
    "Membership",
    "Message",
    "ParameterSize",
    "Pull",
    "Push",
    "Ready",
    "Seat",
    "Send",
    "ServerMachine",
    "Update",
    "Usable",
    "WorkerMachine",
    "cut_and_deal",
    "exchange_seconds",
    "of_size",
    "seats",
]
