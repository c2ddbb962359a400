"""What machines are told beside messages, and what they want done: plain data, and all of it.

Whoever carries actions out (the runtime, the virtual clock, a test) decides nothing: an action says
whom, what and which. `member.py` does it where there are servers; a collective is carried out by
the architecture that asked for it, and timed by `predict/`.
"""

from typing import Literal

import msgspec

from paceline.protocol.messages import (
    Assign,
    AssignState,
    Copy,
    Handed,
    Message,
    Push,
    Settings,
    State,
)


class Action(msgspec.Struct, frozen=True):
    """Base of what a machine wants done."""


class Send(Action, frozen=True, gc=False):
    """Give a message to a member."""

    to: str
    message: Message
    payload: int | None = None
    """The chunk whose gradient (push), weights or mean (answer, assign), state (copy, state, assign
    state) or both (handed) goes with it; how it does, and whether bytes move at all, is the
    transport's affair."""

    seat: bool = False
    """For the seat in that member, not for its worker's side."""


class Keep(Action, frozen=True, gc=False):
    """Hold the gradient that came with this push until work takes it, or it is dropped."""

    push: Push


class KeepCopy(Action, frozen=True, gc=False):
    """Hold the state that came with this copy until weights of a later version have come."""

    copy: Copy


class Adopt(Action, frozen=True, gc=False):
    """Serve a chunk from here on, as a worker has it: what was handed came with this message, or
    from the worker in this process."""

    handed: Handed


class Install(Action, frozen=True, gc=False):
    """Have the weights of a chunk, or the state of its optimizer, as they came with this message,
    or from the worker in this process."""

    message: Assign | AssignState


class KeepState(Action, frozen=True, gc=False):
    """The script asked for this state, which came with the message or is in this process."""

    state: State


class Drop(Action, frozen=True, gc=False):
    """Forget a gradient that was kept: it came too late, or its worker does not count there."""

    chunk: int
    worker: int
    step: int


Kind = Literal["update", "mean", "measure", "apply"]
Part = tuple[int, int, float]
"""A worker, the step of its push, and the weight of its gradient."""


class Work(Action, frozen=True):
    """Something a server computes; the machine is told when it is done."""

    kind: Kind
    """`update`: the mean of the parts, times scale, through the optimizer. `mean`: the mean, times
    scale, is what the answers carry. `measure`: keep the mean and say its norms. `apply`: update
    with the mean that was kept."""

    chunk: int
    step: int
    parts: tuple[Part, ...]
    """In the order of workers, so that sums are the same in every run. Workers without a gradient
    are left out, and count as zero; none at all means no update."""

    settings: list[Settings] | None = None
    """Hyper-parameters of each group for this very step; None: those of the plan."""

    scale: float = 1.0
    rate_factor: float = 1.0
    """What the learning rate is multiplied with. An optimizer that divides by the gradient's size
    would not notice a `scale`."""

    absent: tuple[int, ...] = ()
    """Parameters in the chunk that got no gradient from anybody, and so are not updated."""


class Usable(Action, frozen=True, gc=False):
    """The weights of a chunk have come; a layer that waits for them may go on."""

    chunk: int
    version: int
    absent: tuple[int, ...] = ()
    """A mean gradient's parameters that got no gradient from anybody."""


class Normed(Action, frozen=True):
    """Every chunk of a step on hold is summed: the squared norm of each parameter's gradient."""

    step: int
    squared_norms: tuple[float, ...]


class Blamed(Action, frozen=True):
    """A server's answer to whom the open step of a chunk waits for."""

    chunk: int
    workers: tuple[int, ...]


class AllReduce(Action, frozen=True):
    """Sum a bucket over these workers; all of them name it in the same order."""

    bucket: int
    members: tuple[int, ...]
    tag: int = 0
    """Where not 0 it travels along and is summed too: equal on all members, or they mean different
    things."""


class CrewChange(Action, frozen=True):
    """Who comes to the job, leaves it or is lost, from the step `since` on; 0: from now on. To one
    who joins all come, itself too."""

    since: int
    come: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    cut: int | None = None
    """The first step that these do not count in, where that is the same in all chunks: those who
    take part in it and in others until `since` have divided the samples with them."""


class Rehomed(Action, frozen=True):
    """A server was lost in a step, and these are the seats of all chunks from now on."""

    member: str
    step: int
    owners: tuple[int, ...]


class Dismissed(Action, frozen=True, gc=False):
    """The job is over, and with it the part of this worker, which joined it and would go on."""

    reason: str


class Note(Action, frozen=True):
    """Something for the record."""

    text: str


class Event(msgspec.Struct, frozen=True):
    """Base of what a machine is told by its own member."""


class Ready(Event, frozen=True, gc=False):
    """The gradient of a chunk is made (or, `empty`, will not come this step)."""

    chunk: int
    empty: bool = False
    absent: tuple[int, ...] = ()
    hold: bool = False
    """The script looks at the gradient's norm, or changes settings, before it calls `step`."""

    mean: bool = False
    """The script needs the averaged gradient: the workers update in this step."""

    weight: float = 1.0
    """What it counts, an equal part of the step's samples being 1."""


class Departed(Event, frozen=True, gc=False):
    """The network has taken a chunk that was sent; others may follow."""

    chunk: int


class Configured(Event, frozen=True):
    """The optimizer's settings have changed; they hold from the next gradient or commit on."""

    groups: list[Settings]


class Used(Event, frozen=True):
    """A forward pass used the chunks in this order: for each, its place in it."""

    first_use: tuple[int, ...]


class Stepped(Event, frozen=True, gc=False):
    """The script called `optimizer.step()`; where the step is on hold its gradients are multiplied
    by `scale` (clipping) and it may be updated."""

    scale: float = 1.0


class Fetch(Event, frozen=True, gc=False):
    """Ask for the present weights of all chunks, with all that this worker has sent."""


class FetchStates(Event, frozen=True, gc=False):
    """Ask for the optimizer's state of all chunks."""


class Assigned(Event, frozen=True, gc=False):
    """This worker has weights for a chunk, or optimizer's state, that its server is to take."""

    chunk: int
    state: bool = False


class Asked(Event, frozen=True, gc=False):
    """Ask whom a chunk waits for; answered behind all that was sent to its server before."""

    chunk: int


class Enter(Event, frozen=True, gc=False):
    """Ask to take part in a job that runs."""


class Exit(Event, frozen=True, gc=False):
    """This worker's training is over."""

    failed: bool = False
    """It does not leave where others can go on: it is lost to them."""


class Lost(Event, frozen=True, gc=False):
    """A member's connection has closed; all that it had sent and will ever arrive has arrived."""

    member: str
    ended: bool = False
    """The seat in this process knows that it had finished."""

    step: int | None = None
    """The one that the worker in this process is in; None where there is none."""
