"""Machine of workers that go on in place without one that was lost: `ring` and `average`.

Workers make the same exchanges in the same order; a *turn* is the number of one. An exchange ends
on a worker only when all have entered it, so nobody is ahead by more than one turn. When somebody
is lost each survivor stops inside its turn and reports it, with all the losses it knows of. All
have agreed when all who are left have reported the same losses: then those who are ahead hand the
others what their turn came to, and who is inside the newest turn makes it again with those left.

Only a connection that has closed is a loss, and a process whose connection has closed does not come
back, so losses only grow in number; whoever hears of more reports again. Silence is no loss: two
halves of a network that is cut never both go on.
"""

from collections.abc import Collection, Iterable, Sequence

from paceline.errors import ExchangeError
from paceline.protocol.actions import Action, Event, Lost, Send
from paceline.protocol.messages import Message
from paceline.protocol.placement import worker_of


class Here(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The first word of a worker to each other one."""

    worker: int


class Report(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A survivor has stopped."""

    worker: int
    turn: int
    """Exchanges that have ended here; it is inside the next, or has nothing left to do."""

    lost: tuple[int, ...]
    """All that it knows of, in order."""

    keeps: bool = True
    """It still has what its last turn came to, for one who lacks it."""

    summed: int = 0
    """How many workers' values that was the sum of."""

    weight: float = 1.0
    """What its part of the batch counts, an equal one being 1."""

    samples: int = 0
    """In its part."""

    step: int = 0
    next_step: int = 0
    """The first whose batch was not divided among those before."""

    store: str = ""
    """Where it would keep the job's store."""

    is_done: bool = False


class Done(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker has nothing left to do; it stays for those who may need it."""

    worker: int


class GaveUp(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A worker ends because of the others, as one that waited for them in vain: so do they."""

    worker: int
    why: str


class GiveUp(Event, frozen=True, gc=False):
    """This worker does."""

    why: str


class Stopped(Event, frozen=True, gc=False):
    """This worker is inside an exchange that cannot end, or (`is_done`) through with its work."""

    turn: int
    keeps: bool = True
    summed: int = 0
    weight: float = 1.0
    samples: int = 0
    step: int = 0
    next_step: int = 0
    store: str = ""
    is_done: bool = False


class Regroup(Action, frozen=True):
    """Go on with these workers; the same on all of them."""

    members: tuple[int, ...]
    lost: tuple[int, ...]
    """Since the last time."""

    turn: int
    """The one to make again, by those who are inside it."""

    step: int
    """That it belongs to."""

    since: int
    """The step from which on they divide the batch among them."""

    source: int
    """Who hands over what the turn before came to."""

    behind: tuple[int, ...]
    """Those it is handed to."""

    summed: int
    store: str
    """Where the first of them keeps the job's store."""

    done: tuple[int, ...]
    unseen: int
    """Samples of the turn to be made again that were the lost ones'; 0 where nobody can tell."""

    refusal: str = ""
    """Why they cannot go on."""


class Over(Action, frozen=True, gc=False):
    """Nobody has anything left to do."""


class Refuse(Action, frozen=True, gc=False):
    """Nobody can go on."""

    why: str


class Heard(Action, frozen=True, gc=False):
    """Another worker is there."""

    worker: int


class RegroupMachine:
    """One worker's side."""

    def __init__(self, worker: int, members: Iterable[int]) -> None:
        self.worker = worker
        self.members = tuple(members)
        self.lost: set[int] = set()
        """Since the last time all agreed."""
        self._ever: set[int] = set()
        self._stopped: Stopped | None = None
        self._reports: dict[int, Report] = {}
        self._done: set[int] = set()

    @property
    def remaining(self) -> tuple[int, ...]:
        return tuple(member for member in self.members if member not in self._ever)

    @property
    def lost_at_work(self) -> set[int]:
        """Of the lost those who were not done: one who is done may be seen to leave before the last
        word of another has come."""
        return self.lost - self._done

    @property
    def is_over(self) -> bool:
        return self._done.issuperset((self.worker, *self.remaining))

    @property
    def missing(self) -> tuple[int, ...]:
        """Who has not reported what is known of."""
        known = self._losses()
        reports = {worker for worker, report in self._reports.items() if report.lost == known}
        return tuple(worker for worker in self.remaining if worker not in reports)

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Here(worker):
                # Those behind this worker have called it, and hear that it heard them.
                answer = [Send(f"worker{worker}", Here(self.worker))]
                return [Heard(worker), *(answer if worker > self.worker else ())]
            case Lost():
                lost = worker_of(event.member)
                return [] if lost is None else self._lose([lost])
            case Stopped():
                self._stopped = event
                return [*self._end(), *self._report()]
            case Report():
                self._reports[event.worker] = event
                # One who reports knows of every loss that it names, and may be the first to know.
                return self._lose(event.lost) or self._decide()
            case GiveUp():
                return self._to_all(GaveUp(self.worker, event.why))
            case GaveUp():
                return [Refuse(f"worker{event.worker} gave up: {event.why}")]
            case Done():
                self._done.add(event.worker)
                return self._look_whether_over()
        raise ExchangeError(f"a worker that may lose others cannot handle {event!r}.")

    def _lose(self, workers: Collection[int]) -> list[Action]:
        if self.worker in workers:
            return [Refuse(f"others have lost the connection to worker{self.worker}.")]
        new = {w for w in workers if w in self.members and w not in self._ever}
        if not new or self.is_over:  # when all are done they may leave
            return []
        self._ever |= new
        self.lost |= new
        return [*self._report(), *self._look_whether_over()]

    def _end(self) -> list[Action]:
        assert self._stopped is not None
        if not self._stopped.is_done or self.worker in self._done:
            return []
        self._done.add(self.worker)
        return [*self._to_all(Done(self.worker)), *self._look_whether_over()]

    def _look_whether_over(self) -> list[Action]:
        return [Over()] if self.is_over else []

    def _report(self) -> list[Action]:
        """Say where this worker stands, if it stands and somebody is lost."""
        own = self._stopped
        if own is None or not self.lost:
            return []
        report = Report(
            self.worker,
            own.turn,
            self._losses(),
            own.keeps,
            own.summed,
            own.weight,
            own.samples,
            own.step,
            own.next_step,
            own.store,
            own.is_done,
        )
        self._reports[self.worker] = report
        return [*self._to_all(report), *self._decide()]

    def _losses(self) -> tuple[int, ...]:
        return tuple(sorted(self._ever))

    def _to_all(self, message: Message) -> list[Action]:
        return [Send(f"worker{other}", message) for other in self.remaining if other != self.worker]

    def _decide(self) -> list[Action]:
        if self._stopped is None or not self.lost or self.missing:
            return []
        reports = [self._reports[worker] for worker in self.remaining]
        regroup = decide(self.members, self.lost_at_work, reports)
        self.members, self.lost = self.remaining, set()
        if not self._stopped.is_done:
            self._stopped = None
        return [regroup]


def decide(before: Sequence[int], lost: Iterable[int], reports: Sequence[Report]) -> Regroup:
    """What follows from the reports of all who are left, in order; the same on each of them."""
    turn = max(report.turn for report in reports)
    behind = tuple(report.worker for report in reports if report.turn < turn)
    sources = [report for report in reports if report.turn == turn and report.keeps]
    refusal = ""
    if min(report.turn for report in reports) < turn - 1:
        refusal = "workers are more than one exchange apart, which should not be possible"
    elif behind and not sources:
        refusal = (
            "some had ended the step and some had not, and the script has changed the gradients "
            "since, which the others would need"
        )
    source = sources[0] if sources else reports[0]
    present = sum(report.weight for report in reports)
    samples = sum(report.samples for report in reports)
    return Regroup(
        members=tuple(report.worker for report in reports),
        lost=tuple(sorted(lost)),
        turn=turn,
        step=max(report.step for report in reports),
        since=max(report.next_step for report in reports),
        source=source.worker,
        behind=behind,
        summed=source.summed,
        store=reports[0].store,
        done=tuple(report.worker for report in reports if report.is_done),
        unseen=max(0, round(samples * (len(before) / present - 1))) if present > 0 else 0,
        refusal=refusal,
    )
