"""What members tell each other, as plain data: a worker's action is a server's event and back.

Payloads (gradients, weights) are no part of these: the runtime sends them beside, the predictor
counts their bytes. So the same structures cross a wire, a virtual clock and a test.
"""

import msgspec

Setting = float | int | bool | str | None | list[float]
Settings = dict[str, Setting]
"""One parameter group's hyper-parameters."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all; small, immutable, and encoded as an array with its name first.

    `generation`, where there is one, is that in which the worker was admitted; a worker that joins
    later gets a number that nobody had before.
    """


class Push(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker's gradient of one chunk."""

    worker: int
    chunk: int
    step: int
    """The step it belongs to: the worker's own count, or in `quorum` the updates it has seen."""

    version: int
    """The weights it was computed on: how many updates they had seen."""

    empty: bool = False
    """No gradient this step: counts as zero, and nobody's gradient means no update."""

    absent: tuple[int, ...] = ()
    """Parameters in the chunk that got no gradient this step, where others did."""

    hold: bool = False
    """Sum, but update only when every worker has sent `Commit` (clipping by global norm)."""

    mean: bool = False
    """Answer with the mean of the gradients and leave the weights: the workers update."""

    settings: int = 0
    """Which of this worker's `Configure` messages its update uses; 0 is what the plan says."""

    generation: int = 0
    weight: float = 1.0
    """What it counts, an equal part of the step's samples being 1; it is multiplied in already."""


class Spare(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker's gradient for the seat in its own process, once more: for the seat that would serve
    the chunk if both were lost (`homes.py`). The payload is as of the push."""

    push: Push


class Answer(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The weights of one chunk, for one worker; follows each push, and each pull."""

    chunk: int
    version: int
    late: bool = False
    """The gradient came after its step had closed and was counted, not applied."""

    absent: tuple[int, ...] = ()
    """A mean gradient's parameters that got no gradient from anybody."""

    step: int = -1
    """The step of the push it answers; -1 for a pull."""


class Pull(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker asks for the weights of one chunk, at the start."""

    worker: int
    chunk: int
    version: int = 0
    """Answered when the chunk has seen this many updates."""

    generation: int = 0


class Commit(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker allows the update of a step that was pushed with `hold`."""

    worker: int
    step: int
    scale: float = 1.0
    """What the averaged gradient is multiplied by first; all who began say the same."""

    settings: int = 0
    generation: int = 0


class Configure(Message, frozen=True, array_like=True, tag=True):
    """A worker's hyper-parameters changed; pushes and commits name the number they go by."""

    worker: int
    number: int
    groups: list[Settings]
    generation: int = 0


class Reorder(Message, frozen=True, array_like=True, tag=True):
    """The order in which a real forward pass used the chunks: for each, its place in it."""

    first_use: tuple[int, ...]


class Declare(Message, frozen=True, array_like=True, tag=True, gc=False):
    """`quorum`: a worker has made all gradients of a step; told to the arbiter."""

    worker: int
    step: int
    generation: int = 0


class Chosen(Message, frozen=True, array_like=True, tag=True):
    """`quorum`: whose gradients make a step. The arbiter tells the workers, they tell all seats.

    One choice for all chunks: were each chunk to take its own first k, two workers could each wait
    for the other's next step on different chunks, for ever.
    """

    step: int
    workers: tuple[int, ...]


class Measured(Message, frozen=True, array_like=True, tag=True):
    """The averaged gradient of a chunk on hold: the squared norm of each parameter's part."""

    chunk: int
    step: int
    squared_norms: list[float]


class Join(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker asks the arbiter to take part in a job that runs."""

    worker: int


class Admitted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The arbiter's answer to `Join`; the worker passes it on to every other seat."""

    worker: int
    generation: int
    step: int
    """The first that waits for it; it starts from the weights that have seen all before."""

    crew: tuple[int, ...] = ()
    """Those who are in the job, with it."""

    others: tuple[tuple[int, int, int], ...] = ()
    """Worker, generation and step of those admitted before it that not every seat knows of yet."""


class Welcomed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A seat that got `Admitted` will wait for the worker from the step named there."""

    seat: int
    generation: int


class Settled(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker was welcomed by every seat; told to the arbiter, which need hold back no more."""

    worker: int
    generation: int


class Gone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A seat tells the workers that one of them was lost or has left; they go on without it."""

    worker: int
    step: int = -1
    """The first that it takes no part in, where that is the same in all chunks."""

    left: bool = False


class Gathered(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A seat tells the workers that it has all gradients of a step; `losses.py` says why."""

    seat: int
    step: int
    crew: tuple[int, ...]
    """Whose."""

    moves: int = 0
    """So many seats were lost whose chunks, as far as they were dealt to this one, are here."""


class Sealed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Every seat has all gradients of this step: it may close. A worker tells all seats."""

    worker: int
    step: int
    generation: int = 0


class Doubted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A seat tells the workers whom it has lost; it takes nothing from them any more."""

    seat: int
    workers: tuple[int, ...]
    sealed: int
    """How many steps this seat knows to be sealed."""


class Doubt(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker passes on to a seat whom another has lost; told the decision, if there is one."""

    worker: int
    workers: tuple[int, ...]


class Vow(Message, frozen=True, array_like=True, tag=True, gc=False):
    """All seats have lost these workers, and this one will seal no step that they are in: told to
    the arbiter."""

    worker: int
    lost: tuple[int, ...]
    sealed: int
    """How many steps it knows to be sealed."""

    generation: int = 0


class Cut(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The arbiter's decision: the first step in which the lost workers do not count. It tells the
    workers, before any answer to that step, and they tell all seats."""

    lost: tuple[int, ...]
    step: int


class Copy(Message, frozen=True, array_like=True, tag=True):
    """A seat gives a worker the optimizer's state of a chunk that it has updated: `homes.py` says
    why. The state is the payload, one for each name; the runtime fills in what it needs."""

    chunk: int
    version: int
    names: list[str] = []
    scalars: list[dict[str, float]] = []


class Copied(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker has weights and state of this version of a chunk."""

    worker: int
    chunk: int
    version: int
    generation: int = 0


class Holding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker has of a chunk whose server was lost."""

    chunk: int
    version: int
    """Of the weights, or the mean, that it was answered with."""

    kept: bool
    """It has the optimizer's state of just that version."""

    mean: bool
    """It is a mean, and needs no state."""

    pushed: int
    """The step of a gradient that had gone to the lost server and goes to the new one; or -1."""


class Orphans(Message, frozen=True, array_like=True, tag=True):
    """A worker tells every seat that is left which were lost, and each seat what it has of the
    chunks that are dealt to it now. Its gradients of these come behind it."""

    worker: int
    lost: tuple[int, ...]
    """In the order in which they were."""

    holdings: tuple[Holding, ...]
    joined: tuple[int, ...] = ()
    """Workers that came later, as it was told: the lost seat may have admitted one whom no other
    knows."""

    generation: int = 0
    sealed: int = 0
    """How many steps it knows to be sealed: a seat that had no part in that until now does not."""


class Rescue(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A seat asks a worker for all it has of a chunk whose server was lost."""

    chunk: int
    version: int


class Handed(Message, frozen=True, array_like=True, tag=True):
    """Answers `Rescue`: the payload is weights or mean, and the state, one for each name."""

    worker: int
    chunk: int
    version: int
    absent: tuple[int, ...] = ()
    """A mean gradient's parameters that got no gradient from anybody."""

    bare: bool = False
    """It is a mean: no state comes with it."""

    names: list[str] = []
    scalars: list[dict[str, float]] = []


class Newcomer(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The arbiter tells the workers whom it has admitted, and from which step on.

    It comes before answers that let a worker finish the step before that one.
    """

    worker: int
    step: int


class Stop(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A seat cannot go on, and so nobody can; told to the workers, who say the same."""

    reason: str
    over: int = -1
    """The first step that the job does not take, for one who joined it and would go on."""


class Leave(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker has finished; nobody waits for it from here on."""

    worker: int
    steps: int
    """How many it took part in."""

    generation: int = 0
    sealed: int = 0
    """How many it knows to be sealed."""


class Inquire(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker has waited too long for a chunk and asks why."""

    worker: int
    chunk: int


class Missing(Message, frozen=True, array_like=True, tag=True):
    """Answers `Inquire`: the open step waits for these workers."""

    chunk: int
    workers: list[int]


class Assign(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The leading worker sets the weights of a chunk; they are the payload."""

    worker: int
    chunk: int


class AssignState(Message, frozen=True, array_like=True, tag=True):
    """It sets the optimizer's state of a chunk: one payload for each name."""

    worker: int
    chunk: int
    names: list[str] = []
    scalars: list[dict[str, float]] = []


class FetchState(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker asks for the optimizer's state of a chunk."""

    worker: int
    chunk: int


class State(Message, frozen=True, array_like=True, tag=True):
    """Answers `FetchState`: one payload for each name."""

    chunk: int
    names: list[str] = []
    scalars: list[dict[str, float]] = []
