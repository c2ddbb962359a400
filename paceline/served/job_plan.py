"""What members of this architecture say to each other, and the plan with torch's part."""

from paceline.protocol import messages
from paceline.protocol.plan import Plan
from paceline.wire import Ticket

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
    | messages.AssignState
    | messages.FetchState
    | messages.State
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

    ticket: Ticket | None = None
    """Where the served flats lie in shared memory."""
