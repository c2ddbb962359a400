"""What is said beside the protocol's own messages: the plan with torch's part, optimizer state."""

from paceline.architectures.server.exchange.device_memory import DeviceTicket
from paceline.protocol import messages
from paceline.protocol.messages import Message
from paceline.protocol.plan import Plan
from paceline.wire import Ticket


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
    messages.Push
    | messages.Answer
    | messages.Pull
    | messages.Commit
    | messages.Configure
    | messages.Reorder
    | messages.Declare
    | messages.Chosen
    | messages.Measured
    | messages.Join
    | messages.Admitted
    | messages.Welcomed
    | messages.Settled
    | messages.Gone
    | messages.Newcomer
    | messages.Spare
    | messages.Gathered
    | messages.Sealed
    | messages.Doubted
    | messages.Doubt
    | messages.Vow
    | messages.Cut
    | messages.Copy
    | messages.Copied
    | messages.Orphans
    | messages.Rescue
    | messages.Handed
    | messages.Stop
    | messages.Leave
    | messages.Inquire
    | messages.Missing
    | messages.Assign
    | AssignState
    | FetchState
    | State
)
"""Everything that may travel between members of this architecture."""


class JobPlan(Plan, frozen=True, kw_only=True):
    """What worker 0 publishes before step 1 and everyone else works by."""

    fingerprint: str
    """Names, shapes, strides and kinds of the parameters; equal on all workers."""

    optimizer: str = ""
    """The torch class that runs on the servers; empty when they only sum."""

    accelerated: bool = False
    """The workers compute on devices: the cores of their hosts are free for servers."""

    device: str = "cpu"
    """Where servers hold what they serve; what has come and goes out is in main memory, unless all
    members share the device's."""

    ticket: Ticket | None = None
    """Where the served flats lie in shared memory."""

    device_ticket: DeviceTicket | None = None
    """Where they lie on a GPU that all members share."""

    @property
    def on_device(self) -> bool:
        """Gradients and weights are handed over inside a GPU, not through main memory."""
        return self.device_ticket is not None
