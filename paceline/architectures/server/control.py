"""Messages of the server architecture beside the protocol's: settings, state, questions."""

import msgspec

from paceline import protocol
from paceline.protocol import Message
from paceline.wire import Ticket

Setting = float | int | bool | str | None | list[float]
Settings = dict[str, Setting]
"""One parameter group's hyper-parameters."""


class Hyper(Message, frozen=True, array_like=True, tag=True):
    """The hyper-parameters of a worker's optimizer, from its next push on."""

    worker: int
    groups: list[Settings]


class Assign(Message, frozen=True, array_like=True, tag=True):
    """Worker 0 sets the weights of a chunk; they are the payload."""

    chunk: int


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


class Measured(Message, frozen=True, array_like=True, tag=True):
    """The averaged gradient of a held chunk: the squared norm of each parameter's part."""

    chunk: int
    step: int
    squared_norms: list[float]


class Inquire(Message, frozen=True, array_like=True, tag=True):
    """A worker has waited too long for a chunk and asks why."""

    worker: int
    chunk: int


class Missing(Message, frozen=True, array_like=True, tag=True):
    """Answers `Inquire`: the step waits for these workers."""

    chunk: int
    workers: list[int]


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
