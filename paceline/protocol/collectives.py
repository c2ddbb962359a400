"""Machines of the architectures that sum over all workers: `ring`, `average`, `hybrid`.

A collective by gloo, NCCL or MPI is one action, `AllReduce`; what is decided here is which bucket
is summed when, in an order that is the same on every worker, and what holds afterwards. The sum
itself is the library's. In `hybrid` the buckets that a `RingMachine` lets go are summed inside the
host first: its members tell each other how far they are, real ones through flags in shared memory.
"""

from collections.abc import Iterable, Sequence

from paceline.errors import ExchangeError
from paceline.protocol.actions import Action, AllReduce, Event, Send, Usable
from paceline.protocol.messages import Message


class Made(Event, frozen=True, gc=False):
    """A bucket's gradients are all made."""

    bucket: int


class Finish(Event, frozen=True, gc=False):
    """Backward is over: what is not made by now will not come in this step."""


class Reduced(Event, frozen=True, gc=False):
    """A bucket holds its sum; with it the sum of the tags that went along, and of how many."""

    bucket: int
    tags: int = 0
    summed: int = 0


class RingMachine:
    """`ring`: buckets leave as backward fills them, always in the same order.

    A bucket is *usable* when its sum is there; a step's buckets are numbered in the order in which
    backward makes them (last layer first). Their versions count steps.
    """

    def __init__(self, members: Sequence[int], buckets: int, *, step: int = 0) -> None:
        self.step = step
        self.started = 0
        """Buckets of this step that have left."""
        self._members, self._buckets = tuple(members), buckets
        self._made: set[int] = set()
        self._reduced = 0

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Made():
                self._made.add(event.bucket)
                return self._start()
            case Finish():
                self._made.update(range(self._buckets))
                return self._start()
            case Reduced():
                return self._take(event)
        raise ExchangeError(f"a worker of a ring cannot handle {event!r}.")

    def _start(self) -> list[Action]:
        """In the same order on every worker, whatever the order of their gradients."""
        actions: list[Action] = []
        while self.started in self._made:
            actions.append(AllReduce(self.started, self._members))
            self.started += 1
        return actions

    def _take(self, event: Reduced) -> list[Action]:
        usable = Usable(event.bucket, self.step + 1)
        self._reduced += 1
        if self._reduced == self._buckets:
            self._made.clear()
            self.started = self._reduced = 0
            self.step += 1
        return [usable]


class Settle(Event, frozen=True, gc=False):
    """The script looks at the weights: all workers must agree on them, out of turn if need be."""


class LocalStepTaken(Event, frozen=True, gc=False):
    """One local step was taken."""


class Remain(Event, frozen=True):
    """These workers are there; others may have been lost."""

    members: tuple[int, ...]
    void: bool = False
    """The sum under way came to nothing by that."""


class Agree(Action, frozen=True, gc=False):
    """The mean of a round is there: take it for the weights (`late`: add what it changes to them,
    as local steps were taken since it left)."""

    round: int
    late: bool = False


WEIGHTS, BESIDE, SHAPES = range(3)
"""What a round sums, as buckets: the weights; what is averaged at once before they leave (buffers,
an optimizer's state); how much of it there is, which must be the same on all workers."""


class AverageMachine:
    """`average`: a round every so many local steps.

    Overlapped, a round's sum travels during the local steps of the next and is taken when that one
    begins: always at the same step, however fast it was, so a run repeats exactly. The tag of a
    round is its step, negative when it is out of turn: a worker that settles where others train on
    is told so, instead of mixing two rounds.
    """

    def __init__(
        self,
        members: Sequence[int],
        *,
        every: int,
        overlap: bool = False,
        buffers: bool = False,
        state: bool = False,
        outer: bool = False,
        step: int = 0,
    ) -> None:
        """`buffers`, `state`: the model's, the optimizer's are averaged too. `outer`: a mean leads
        to other weights, so that a round moves even one who is alone."""
        self.step, self.rounds = step, 0
        self.agreed = True
        """No local step was taken since the last round ended."""
        self.flies = False
        """Local steps are taken behind the weights of a round that was begun and not taken."""
        self._members, self._every, self._overlap = tuple(members), every, overlap
        self._buckets = (*(SHAPES,) * state, *(BESIDE,) * (state or buffers), WEIGHTS)
        self._outer = outer
        self._under_way: int | None = None
        """Tag of the round whose sums are on their way."""
        self._unsummed: list[int] = []
        """Buckets of that round, the one that is being summed first."""
        self._next: int | None = None
        """Tag of the round that begins when the one under way has ended."""

    @property
    def waits(self) -> bool:
        """Training goes on only when the round under way has ended."""
        return self._next is not None or (self._under_way is not None and not self.flies)

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case LocalStepTaken() | Settle() if self.waits:
                raise ExchangeError("a worker went on while the weights were being averaged.")
            case LocalStepTaken():
                self.step += 1
                self.agreed = False
                return self._begin(self.step) if self.step % self._every == 0 else []
            case Settle():
                return [] if self.agreed else self._begin(-self.step)
            case Reduced():
                return self._reduced(event)
            case Remain():
                self._members = event.members
                return [self._sum()] if event.void else []
        raise ExchangeError(f"a worker that averages cannot handle {event!r}.")

    def _begin(self, tag: int) -> list[Action]:
        """Take the round before this one, if it flies, and start."""
        if self._under_way is not None:
            self._next = tag
            return []
        actions: list[Action] = [Agree(self.rounds - 1, late=True)] if self.flies else []
        self.flies = False
        self.rounds += 1
        if len(self._members) == 1 and not self._outer:  # one's own weights are the mean
            self.agreed = True
            return actions
        self._under_way, self._unsummed = tag, list(self._buckets)
        return [*actions, self._sum()]

    def _sum(self) -> AllReduce:
        bucket, tag = self._unsummed[0], self._under_way or 0
        if bucket != WEIGHTS:
            return AllReduce(bucket, self._members)
        self.flies = self._overlap and tag > 0
        return AllReduce(WEIGHTS, self._members, tag)

    def _reduced(self, event: Reduced) -> list[Action]:
        assert self._under_way is not None
        if event.bucket != WEIGHTS:
            self._unsummed.pop(0)
            return [Usable(event.bucket, self.rounds), self._sum()]
        if event.tags != self._under_way * event.summed:
            raise ExchangeError(
                "the workers do not average at the same point: one asked for the mean "
                "(state_dict, eval or settle) where another went on training. Call "
                "paceline.settle() on every worker first; then one of them may save or evaluate."
            )
        self._under_way = None
        if not self.flies:
            self.agreed = True
            return [Agree(self.rounds - 1)]
        if self._next is None:
            return []
        tag, self._next = self._next, None
        return self._begin(tag)


class Brought(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A member of the host has filled a bucket."""

    worker: int
    bucket: int
    step: int


class Summed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A member of the host has summed its stretch of a bucket."""

    worker: int
    bucket: int
    step: int


class SumShared(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The leader has the sum over all hosts where the others can read it."""

    bucket: int
    step: int


class SumStretch(Action, frozen=True, gc=False):
    """Sum this member's stretch of a bucket over the members of its host; then tell `Stretched`."""

    bucket: int
    place: int
    """Which of so many stretches."""

    places: int


class Stretched(Event, frozen=True, gc=False):
    """A stretch was summed."""

    bucket: int


def hosts_of(names: Iterable[object]) -> list[list[int]]:
    """From the name of each worker's host to the workers of each, in order of rank; the first of
    each leads."""
    mates: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        mates.setdefault(name, []).append(rank)
    return list(mates.values())


Told = dict[tuple[int, int], set[int]]
"""Step and bucket -> members that have, until the step is over: one who is ahead may tell of it."""


class HybridMachine:
    """`hybrid`: each sums its stretch of every bucket; leaders exchange what their hosts summed."""

    def __init__(
        self, worker: int, hosts: Sequence[Sequence[int]], buckets: int, *, step: int = 0
    ) -> None:
        """`hosts`: the workers of each; the first leads."""
        self.worker, self.step = worker, step
        self._mates = next(tuple(mates) for mates in hosts if worker in mates)
        self._leaders = tuple(mates[0] for mates in hosts)
        self._leads = self._mates[0] == worker
        self._buckets = buckets
        self._brought: Told = {}
        self._summed: Told = {}
        self._num_summed = self._num_sent = self._num_shared = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Whom the open step waits for: who has not brought all of its buckets, else not summed its
        stretch of them; else those who exchange the hosts' sums, as far as they are known here."""
        for told in (self._brought, self._summed):
            done = [told.get((self.step, bucket), ()) for bucket in range(self._buckets)]
            late = tuple(mate for mate in self._mates if any(mate not in who for who in done))
            if late:
                return late
        if not self._leads:
            return self._mates[:1]
        return tuple(leader for leader in self._leaders if leader != self.worker)

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Made():
                told = Brought(self.worker, event.bucket, self.step)
                self._brought.setdefault((self.step, event.bucket), set()).add(self.worker)
                return [*self._to_mates(told), *self._advance()]
            case Brought():
                self._brought.setdefault((event.step, event.bucket), set()).add(event.worker)
                return self._advance()
            case Stretched():
                done = Summed(self.worker, event.bucket, self.step)
                return [*self._to_mates(done), *self._count_summed(done)]
            case Summed():
                return self._count_summed(event)
            case Reduced():
                return self._share(event.bucket)
            case SumShared() if event.step == self.step:
                return self._usable(event.bucket)
        raise ExchangeError(f"a worker of a host cannot handle {event!r}.")

    def _to_mates(self, message: Message) -> list[Action]:
        return [Send(f"worker{mate}", message) for mate in self._mates if mate != self.worker]

    def _advance(self) -> list[Action]:
        """Sum what everybody has brought, bucket by bucket in the same order on all."""
        actions: list[Action] = []
        place, places = self._mates.index(self.worker), len(self._mates)
        while self._have_all(self._brought, self._num_summed):
            actions.append(SumStretch(self._num_summed, place, places))
            self._num_summed += 1
        return actions

    def _have_all(self, told: Told, bucket: int) -> bool:
        return len(told.get((self.step, bucket), ())) == len(self._mates)

    def _count_summed(self, event: Summed) -> list[Action]:
        """What all have summed can be read, or goes on to the other hosts."""
        self._summed.setdefault((event.step, event.bucket), set()).add(event.worker)
        actions: list[Action] = []
        while self._have_all(self._summed, self._num_sent):
            bucket, self._num_sent = self._num_sent, self._num_sent + 1
            if len(self._leaders) == 1:
                actions += self._usable(bucket)
            elif self._leads:
                actions.append(AllReduce(bucket, self._leaders))
        return actions

    def _share(self, bucket: int) -> list[Action]:
        return [*self._to_mates(SumShared(bucket, self.step)), *self._usable(bucket)]

    def _usable(self, bucket: int) -> list[Action]:
        usable = Usable(bucket, self.step + 1)
        self._num_shared += 1
        if self._num_shared < self._buckets:
            return [usable]
        self._num_summed = self._num_sent = self._num_shared = 0
        self.step += 1
        for told in (self._brought, self._summed):
            for over in [key for key in told if key[0] < self.step]:
                del told[over]
        return [usable, *self._advance()]
