"""Workers that go on in place without one that was lost, as one worker's session has them.

Who agrees on what, and how, is `collectives/crew.py`; here is what it means for the batches that
are divided, for the record and for the end of a job.
"""

import sys
import time
from typing import TYPE_CHECKING

import torch

from paceline import spec
from paceline.collectives.context import Context
from paceline.collectives.crew import Crew, Progress
from paceline.collectives.elastic import hand_over
from paceline.collectives.group import backend_for
from paceline.data.sampling import split
from paceline.errors import DeadlineError, ExchangeError, PacelineError
from paceline.protocol.regrouping import Regroup
from paceline.session import stores

if TYPE_CHECKING:
    from paceline.session.session import Session


class Survivors:
    """There are none to be until an architecture asks; then all workers meet."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._crew: Crew | None = None
        self._have_met = False
        self.makes_again = False
        """The loop computes a step again that a loss has interrupted."""
        self.lost_servers: set[str] = set()
        self._divides_from: tuple[int, tuple[int, ...]] | None = None
        """The step from which on others share the batch, and who."""
        self._left_out: dict[int, tuple[int, int]] = {}
        """Lost workers, the first step that each does not count in, and in how many steps samples
        were divided with it all the same."""

    def server_lost(self, name: str, step: int) -> None:
        """Called between two steps where others serve what a lost server did."""
        if name in self.lost_servers:  # each call of `distribute` says so
            return
        self.lost_servers.add(name)
        session = self._session
        session.close_to_newcomers(f"{name} was lost")
        if session.recorder is not None and session.speaks_for_all:
            left = session.identity.servers - len(self.lost_servers)
            others = f"the other {left} serve" if left > 1 else "the last one serves"
            session.recorder.lost(name, step, "", what=f"{others} its parameters from then on")

    def leave_out(self, rank: int, step: int, steps: int) -> None:
        """Servers count a lost worker in no step from `step` on, and in `steps` of them batches
        were divided with it."""
        self._left_out[rank] = step, steps

    def members_changed(
        self, members: tuple[int, ...], lost: tuple[int, ...], left: tuple[int, ...] = ()
    ) -> None:
        """Called at the end of a step: these share the batch from the next on."""
        session = self._session
        unseen = {rank: self._unseen(rank) for rank in (*lost, *left)}
        session.ended.update(left)
        for rank in (*lost, *left):
            session.positions.forget(rank)
        members = tuple(sorted({*members, *session.ended}))
        come, session.members = set(members) - set(session.members), members
        for rank in come - {session.rank} if not session.has_joined else ():
            session.positions.welcome(rank)
        if session.recorder is None or not session.speaks_for_all:
            return
        count = len(session.sharing)
        for rank in lost:
            since, _ = self._left_out.get(rank, (session.step, 0))
            others = f"the other {count} share" if count > 1 else "the last one computes"
            session.recorder.lost(f"worker{rank}", since, others, samples=unseen[rank])
        for rank in left:
            since, _ = self._left_out[rank]
            text = f"worker{rank} takes part in no step from {since} on"
            text = f"{text}; {unseen[rank]} of its samples were not seen" if unseen[rank] else text
            text = f"{text}; {count} workers share the batch from {session.step + 1} on"
            session.note(text, "warning" if unseen[rank] else "note")
        for rank in come:
            text = f"worker{rank} joined after step {session.step}"
            session.note(f"{text}; {count} workers share the batch from then on")

    def _unseen(self, rank: int) -> int | None:
        """How many samples of a worker that was lost nobody has trained on: those that were divided
        with it in the steps that it does not count in. None where that is not known."""
        session = self._session
        last, scale = session.recent[-1] if session.recent else None, session.gradients.scale
        if last is None or rank not in self._left_out or not (last.samples and scale):
            return None
        crew = sorted({*session.sharing, rank})
        given = session.folder.experiment().cluster.shares if session.folder is not None else ()
        shares = [given[member] if member < len(given) else 1.0 for member in crew]
        total = round(last.samples * len(crew) / scale)
        part = split(total, shares)[crew.index(rank)]
        return int(part.stop - part.start) * self._left_out[rank][1]

    @property
    def go_on(self) -> bool:
        """Workers that are left regroup where one is lost."""
        return self._have_met

    @property
    def are_short(self) -> bool:
        """A worker is lost, and the others have not agreed yet how to go on."""
        return self._crew is not None and self._crew.is_short

    def meet(self, context: Context) -> Crew | None:
        """The crew; None where nobody goes on, or servers or MPI have their own way to."""
        session, identity = self._session, self._session.identity
        options, store = session.options, session.store
        if self._have_met or not identity.goes_on or session.workers == 1:
            return self._crew
        if not options.regroups:
            return None
        backend = options.backend if isinstance(options, spec.Ring | spec.Average) else "gloo"
        if backend_for(context, backend) == "gloo" and isinstance(store, stores.JobStore):
            self._have_met = True
            self._crew = Crew(
                identity,
                store,
                deadline_seconds=stores.DEADLINE_SECONDS,
                keep_store=store.keep,
                follow_store=store.follow,
            )
        return self._crew

    def progress(self) -> Progress:
        session = self._session
        return Progress(
            step=session.step,
            next_step=session.step + (session.samples_of_step > 0),
            samples=session.samples,
            weight=session.gradients.scale,
        )

    def regrouped(self, regroup: Regroup) -> None:
        """Called by the training thread when those who are left have agreed."""
        self._divides_from = (0 if self.makes_again else regroup.since, regroup.members)
        self.divide_anew()
        assert self._crew is not None
        seconds = time.monotonic() - self._crew.noticed_seconds
        if self._session.rank != regroup.members[0]:
            return
        count = len(regroup.members)
        others = f"the other {count} go" if count > 1 else "the last one goes"
        what, unseen = f"{others} on, agreed after {seconds:.2f} s", 0
        if regroup.done:
            what += "; all steps were done"
        elif self.makes_again:
            what += "; that step is made again on the whole batch"
        else:
            unseen = regroup.unseen
            what += f"; {unseen} samples were not seen"
        for rank in regroup.lost:
            self._tell(rank, regroup.step, what, unseen)
            unseen = 0  # they are those of all that were lost together

    def _tell(self, rank: int, step: int, what: str, unseen: int = 0) -> None:
        """On the terminal and in the record."""
        name, recorder = f"worker{rank}", self._session.recorder
        print(f"{name} was lost in step {step}; {what}", file=sys.stderr, flush=True)
        if recorder is not None:
            recorder.lost(name, step, "", unseen, what)

    def divide_anew(self) -> None:
        """Called behind each step: the batch of the next may be the first that is divided among
        those who are left."""
        if self._divides_from is not None and self._session.step >= self._divides_from[0]:
            self._session.members, self._divides_from = self._divides_from[1], None

    def end_together(self) -> None:
        """Stay until no worker needs another one any more: what one does alone may follow."""
        error = self.leave(None)
        if error is not None:
            raise error

    def leave(self, failed: BaseException | None) -> PacelineError | None:
        """The same at the end of a session; what went wrong meanwhile is returned."""
        crew = self._crew
        if crew is None:
            return None
        if failed is not None:
            self._crew = None
            theirs = isinstance(failed, DeadlineError | ExchangeError)
            crew.close(str(failed) if theirs else "")
            return None
        context = self._session.context(torch.device("cpu"), -1)

        def serve(regroup: Regroup) -> None:
            self.regrouped(regroup)
            hand_over(context, crew, regroup, ())

        try:
            lost = crew.finish(self.progress(), serve)
        except PacelineError as error:
            return error
        finally:
            crew.close()
            self._crew = None
        self._end(crew.members, lost)
        return None

    def _end(self, members: tuple[int, ...], lost: tuple[int, ...]) -> None:
        session = self._session
        session.members = tuple(rank for rank in members if rank not in lost)
        if session.speaks_for_all:
            for rank in lost:
                self._tell(rank, session.step, "all steps were done")
