"""What members tell each other, as plain data: a worker's action is a server's event and back.

Payloads (gradients, weights) are no part of these: the runtime sends them beside, the predictor
counts their bytes. So the same structures cross a wire, a virtual clock and a test.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all; small, immutable, and encoded as an array with its name first."""


class Push(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker's gradient of one chunk."""

    worker: int
    chunk: int
    step: int
    """The step it belongs to: the worker's own count, or in `quorum` the updates it has seen."""

    version: int
    """The weights it was computed on: how many updates they had seen."""

    samples: float = 1.0
    """How much it counts; the server divides by the sum over those that count."""

    empty: bool = False
    """No gradient this step: counts as zero, and nobody's gradient means no update."""

    absent: tuple[int, ...] = ()
    """Parameters in the chunk that got no gradient this step, where others did."""

    hold: bool = False
    """Sum, but update only when every worker has sent `Commit` (clipping by global norm)."""

    mean: bool = False
    """Do not update: answer with the mean gradient; the workers update by themselves."""


class Answer(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The weights of one chunk, for one worker; follows each push, and each pull."""

    worker: int
    chunk: int
    version: int
    late: bool = False
    """The gradient came after its step had closed and was counted, not applied."""

    absent: tuple[int, ...] = ()
    """A mean gradient's parameters that got no gradient from anybody."""


class Pull(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker asks for the present weights of one chunk, at the start."""

    worker: int
    chunk: int


class Commit(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker allows the update of a step that was pushed with `hold`."""

    worker: int
    step: int
    scale: float = 1.0
    """What the averaged gradient is multiplied by first; every worker says the same."""


class Declare(Message, frozen=True, array_like=True, tag=True, gc=False):
    """`quorum`: a worker has made all gradients of a step; told to the arbiter, seat 0."""

    worker: int
    step: int


class Chosen(Message, frozen=True, array_like=True, tag=True):
    """`quorum`: whose gradients make a step. The arbiter tells the workers, they tell all seats.

    One choice for all chunks: were each chunk to take its own first k, two workers could each wait
    for the other's next step on different chunks, for ever.
    """

    step: int
    workers: tuple[int, ...]


class Join(Message, frozen=True, array_like=True, tag=True, gc=False):
    worker: int


class Leave(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker has finished or was lost; nobody waits for it from here on."""

    worker: int
    steps: int
    """How many it took part in."""
