"""Messages of the server architecture beside the protocol's: settings, state, questions."""

import msgspec

from paceline import protocol
from paceline.protocol import Message
from paceline.protocol.messages import Assign as Assign
from paceline.protocol.messages import Inquire as Inquire
from paceline.protocol.messages import Measured as Measured
from paceline.protocol.messages import Missing as Missing
from paceline.protocol.messages import Setting as Setting
from paceline.protocol.messages import Settings as Settings
from paceline.wire import Ticket


class Hyper(Message, frozen=True, array_like=True, tag=True):
    """The hyper-parameters of a worker's optimizer, from its next push on."""

    worker: int
    groups: list[Settings]


class AssignState(Message, frozen=True, array_like=True, tag=True):
    """Worker 0 sets the optimizer's state of a chunk: one payload for each name."""

    chunk: int
    names: list[str]
    scalars: list[dict[str, float]]


class FetchState(Message, frozen=True, array_like=True, tag=True):
    worker: int
    chunk: int


class State(Message, frozen=True, array_like=True, tag=True):
    """Answers `FetchState`: one payload for each name."""

    chunk: int
    names: list[str]
    scalars: list[dict[str, float]]


AnyMessage = (
    protocol.Push
    | protocol.Answer
    | protocol.Pull
    | protocol.Commit
    | protocol.Declare
    | protocol.Chosen
    | protocol.Join
    | protocol.Leave
    | Hyper
    | Assign
    | AssignState
    | FetchState
    | State
    | Measured
    | Inquire
    | Missing
)
"""Everything that may travel between members of this architecture."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What worker 0 publishes before step 1 and everyone else works by."""

    layout: protocol.Layout
    fingerprint: str
    """Names, shapes, strides and kinds of the parameters; equal on all workers."""

    owners: tuple[int, ...]
    seats: tuple[protocol.Seat, ...]
    shared: bool
    """Payloads lie in shared memory; else they travel."""

    optimizer: str = ""
    """The torch class that runs on the servers; empty when they only sum."""

    groups: list[Settings] = msgspec.field(default_factory=list)
    ticket: Ticket | None = None
    """Where the served flats lie in shared memory."""
