"""The workers of a job, as one of them knows them at its current step."""

from paceline.launch import Identity


class Participants:
    """Ranks of the workers that take part, and what follows from them for this one."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.step = 0
        """The step that this worker takes next; all properties speak of it."""

        self.first_step = 0
        """The first step that this worker took part in."""

        self.members = tuple(range(self.workers))
        """Ranks of the workers that are in the job: fewer once one has failed and the others
        continue, more once one has joined."""

        self.ended: set[int] = set()
        """Members that have ended before this worker, and share no batch any more."""

        self.failed_from: dict[int, int] = {}
        """Failed workers, and the first step that each does not count in. It is known by the time
        that the next step is begun."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.identity.rank

    @property
    def workers(self) -> int:
        """Number of workers that began the job."""
        return self.identity.founders or self.identity.workers

    @property
    def may_grow(self) -> bool:
        """A worker may join the job: its servers admit it, or its coordinator does."""
        return bool(self.identity.servers) or self.identity.goes_on

    @property
    def has_joined(self) -> bool:
        """This worker joined a running job."""
        return self.identity.has_joined

    @property
    def sharing(self) -> tuple[int, ...]:
        """Ranks of the workers among which a batch is divided."""
        return tuple(rank for rank in self.members if rank not in self.ended)

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks of the workers that take part in the next step, the same on all of them.

        The batch may still be divided with more.
        """
        step, failed = self.step, self.failed_from
        return tuple(rank for rank in self.members if failed.get(rank, step) >= step)

    @property
    def leader(self) -> int:
        """Rank of the worker that draws for all; it may have ended after drawing."""
        return min(self.present, default=self.rank)

    @property
    def speaker(self) -> int:
        """Rank of the worker that does what is done once for all: 0 until it ends or fails."""
        return min((r for r in self.present if r not in self.ended), default=self.rank)

    @property
    def is_speaker(self) -> bool:
        """This process does what is done once for all."""
        return self.identity.role == "worker" and self.rank == self.speaker

    def begin_at(self, step: int) -> None:
        """Take `step` next, as the first one: the job ran before, or resumes."""
        self.first_step = self.step = step
