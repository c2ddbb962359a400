"""Changes of the view, as one worker's session takes part in them.

How they agree is `collectives/views.py`; here is what a view means for the batches that
are divided, for the record and for the end of a job.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.architectures.base import CountsPasses, KeepsState
from paceline.collectives.context import Context, MembershipContext
from paceline.collectives.group import Group, backend_for
from paceline.collectives.state import give, take
from paceline.collectives.view_collective import hand_over
from paceline.collectives.views import ViewChanged, Views
from paceline.data.sampling import split
from paceline.errors import DeadlineError, ExchangeError, PacelineError
from paceline.protocol.views import View
from paceline.record import RunFolder
from paceline.session import stores
from paceline.session.distribution import Distribution
from paceline.session.join_obstacle import JoinObstacle
from paceline.session.loader.positions import Positions
from paceline.session.participants import Participants
from paceline.session.step_record import StepRecord


class ViewChanges(MembershipContext):
    """Created lazily: the first architecture that needs views connects this worker."""

    def __init__(
        self,
        participants: Participants,
        steps: StepRecord,
        distribution: Distribution,
        positions: Positions,
        obstacle: JoinObstacle,
        store: Store | None,
        folder: RunFolder | None,
    ) -> None:
        self._participants, self._steps, self._distribution = participants, steps, distribution
        self._positions, self._obstacle = positions, obstacle
        self._store, self._folder = store, folder
        self._views: Views | None = None
        self._context: Context | None = None
        """Of the call of `distribute` that connected this worker."""
        self._have_met = False
        self.lost_servers: set[str] = set()
        self._divides_from: tuple[int, tuple[int, ...]] | None = None
        """The step from which on others share the batch, and who."""
        self._left_out: dict[int, tuple[int, int]] = {}
        """Lost workers, the first step that each does not count in, and in how many steps samples
        were divided with it all the same."""

    def ended(self) -> dict[str, int]:
        """See `MembershipContext`."""
        participants, store = self._participants, self._store
        if store is None:
            return {}
        names = [f"worker{rank}" for rank in participants.members if rank != participants.rank]
        try:
            return {n: int(store.get(f"ended/{n}")) for n in names if store.check([f"ended/{n}"])}
        except dist.DistNetworkError:  # worker 0 keeps it, and has waited for the others in vain
            return {"worker0": participants.step}

    def joined_at(self, step: int) -> None:
        """See `MembershipContext`."""
        self._participants.begin_at(step)

    def failed_from(self, worker: int, step: int) -> None:
        """See `MembershipContext`."""
        self._participants.failed_from[worker] = step

    def server_failed(self, server: str, step: int) -> None:
        """See `MembershipContext`."""
        if server in self.lost_servers:  # each call of `distribute` says so
            return
        self.lost_servers.add(server)
        self._obstacle.close(f"{server} was lost")
        recorder = self._steps.recorder
        if recorder is not None and self._participants.is_speaker:
            left = self._participants.identity.servers - len(self.lost_servers)
            others = f"the other {left} serve" if left > 1 else "the last one serves"
            recorder.lost(server, step, "", what=f"{others} its parameters from then on")

    def left_out(self, worker: int, step: int, steps: int) -> None:
        """See `MembershipContext`."""
        self._left_out[worker] = step, steps

    def members_changed(
        self, members: tuple[int, ...], failed: tuple[int, ...], left: tuple[int, ...] = ()
    ) -> None:
        """See `MembershipContext`."""
        participants, recorder, step = self._participants, self._steps.recorder, self._step
        unseen = {rank: self._unseen(rank) for rank in (*failed, *left)}
        participants.ended.update(left)
        for rank in (*failed, *left):
            self._positions.forget(rank)
        members = tuple(sorted({*members, *participants.ended}))
        come, participants.members = set(members) - set(participants.members), members
        for rank in come - {participants.rank} if not participants.has_joined else ():
            self._positions.welcome(rank)
        if recorder is None or not participants.is_speaker:
            return
        count = len(participants.sharing)
        for rank in failed:
            since, _ = self._left_out.get(rank, (step, 0))
            others = f"the other {count} share" if count > 1 else "the last one computes"
            recorder.lost(f"worker{rank}", since, others, samples=unseen[rank])
        for rank in left:
            since, _ = self._left_out[rank]
            text = f"worker{rank} takes part in no step from {since} on"
            text = f"{text}; {unseen[rank]} of its samples were not seen" if unseen[rank] else text
            text = f"{text}; {count} workers share the batch from {step + 1} on"
            self._steps.note(text, "warning" if unseen[rank] else "note")
        for rank in come:
            text = f"worker{rank} joined after step {step}"
            self._steps.note(f"{text}; {count} workers share the batch from then on")

    def _unseen(self, rank: int) -> int | None:
        """How many samples of a worker that was lost nobody has trained on: those that were divided
        with it in the steps that it does not count in. None where that is not known."""
        recent, scale = self._steps.recent, self._distribution.gradients.scale
        last = recent[-1] if recent else None
        if last is None or rank not in self._left_out or not (last.samples and scale):
            return None
        sharing = sorted({*self._participants.sharing, rank})
        folder = self._folder
        given = folder.experiment().cluster.shares if folder is not None else ()
        shares = [given[member] if member < len(given) else 1.0 for member in sharing]
        total = round(last.samples * len(sharing) / scale)
        part = split(total, shares)[sharing.index(rank)]
        return int(part.stop - part.start) * self._left_out[rank][1]

    @property
    def _step(self) -> int:
        return self._participants.step

    @property
    def go_on(self) -> bool:
        """The workers that remain continue after a failure."""
        return self._have_met

    @property
    def must_stop(self) -> bool:
        """A participant has failed, and this worker has not taken the view that follows."""
        return self._views is not None and self._views.must_stop

    def meet(self, context: Context, options: spec.Architecture) -> Views | None:
        """The job's views; None if a failure ends it, or if servers or MPI continue it."""
        identity, store = context.identity, self._store
        if self._have_met or not identity.goes_on or self._participants.workers == 1:
            return self._views
        if not options.regroups:
            return None
        chosen = backend_for(context, options.collective)
        if chosen == "gloo" and isinstance(store, stores.JobStore):
            self._have_met, self._context = True, context
            self._views = Views(
                identity,
                store,
                deadline_seconds=stores.DEADLINE_SECONDS,
            )
        return self._views

    def view_changed(self, view: View) -> None:
        """See `MembershipContext`."""
        repeats_steps = self._distribution.repeats_steps
        self._divides_from = (0 if repeats_steps else view.first_step, view.participants)
        self._divide_anew()
        assert self._views is not None
        seconds = time.monotonic() - self._views.noticed_seconds
        if self._participants.rank != view.participants[0]:
            return
        count = len(view.participants)
        others = f"the other {count} go" if count > 1 else "the last one goes"
        what, unseen = f"{others} on, agreed after {seconds:.2f} s", 0
        if view.done:
            what += "; all steps were done"
        elif repeats_steps:
            what += "; that step is made again on the whole batch"
        else:
            unseen = view.unseen
            what += f"; {unseen} samples were not seen"
        for rank in view.left:
            text = f"worker{rank} takes part in no step from {view.step} on"
            text = f"{text}; {unseen} of its samples were not seen" if unseen else text
            self._steps.note(text, "warning" if unseen else "note")
        for rank in view.failed:
            self._tell(rank, view.step, what, unseen)
            unseen = 0  # they are those of all that were lost together

    def _tell(self, rank: int, step: int, what: str, unseen: int = 0) -> None:
        """On the terminal and in the record."""
        name, recorder = f"worker{rank}", self._steps.recorder
        print(f"{name} was lost in step {step}; {what}", file=sys.stderr, flush=True)
        if recorder is not None:
            recorder.lost(name, step, "", unseen, what)

    def after_step(self) -> None:
        """Called between two steps: take what has changed by then."""
        self._divide_anew()
        views, context = self._views, self._context
        if views is None or context is None:
            return
        while True:
            with suppress(ViewChanged):
                view = views.between_steps(self._distribution.progress())
                if view is None:
                    return
                if view.redo:
                    self.view_changed(view)
                    hand_over(context, views, view, ())
                else:
                    self._let_in(view, Group(self._own(context, views), "gloo", view.participants))

    def _let_in(self, view: View, group: Group) -> None:
        """All participants are at the view's first step; the workers that join get the state."""
        if self._participants.rank == view.source:
            (trained,), (architecture,) = (
                self._distribution.trained,
                self._distribution.architectures,
            )
            assert self._views is not None
            values = {
                "exchanges": self._views.exchanges,
                "optimizers": [optimizer.state_dict() for optimizer in trained.optimizers],
                "kept": architecture.state() if isinstance(architecture, KeepsState) else {},
                "passes": architecture.passes if isinstance(architecture, CountsPasses) else 0,
            }
            give(group, view, trained.everything(), values)
        participants, step = self._participants, self._step - 1
        participants.members = view.participants
        for rank in view.joined:
            self._positions.welcome(rank)
            text = f"worker{rank} joined after step {step}"
            count = len(participants.sharing)
            self._steps.note(f"{text}; {count} workers share the batch from then on")

    def join(self) -> None:
        """Called once on a worker that joins, when its model is distributed: take part in a view,
        with the state of its first step."""
        views, context = self._views, self._context
        if views is None or context is None or views.has_state:
            return
        (trained,), (architecture,) = self._distribution.trained, self._distribution.architectures
        while not views.has_state:
            with suppress(ViewChanged):
                view = views.join()
                group = Group(self._own(context, views), "gloo", view.participants)
                values = take(group, view, trained.everything())
                for optimizer, state in zip(trained.optimizers, values["optimizers"], strict=True):
                    optimizer.load_state_dict(state)
                if isinstance(architecture, KeepsState):
                    architecture.restore(values["kept"], own=False)
                if isinstance(architecture, CountsPasses):
                    architecture.passes = values["passes"]
                self._participants.begin_at(view.first_step)
                self._participants.members = view.participants
                views.confirm(values["exchanges"])

    def _own(self, context: Context, views: Views) -> Context:
        """What is the session's own, and of no call of `distribute`."""
        return replace(context, store=self._store, views=views)

    def _divide_anew(self) -> None:
        """Called behind each step: the batch of the next may be the first that is divided among
        those who are left."""
        if self._divides_from is not None and self._step >= self._divides_from[0]:
            self._participants.members, self._divides_from = self._divides_from[1], None

    def leave(
        self, failed: BaseException | None, context: Callable[[], Context]
    ) -> PacelineError | None:
        """Stay until no worker needs another one any more; return what went wrong meanwhile."""
        views = self._views
        if views is None:
            return None
        if failed is not None:
            self._views = None
            theirs = isinstance(failed, DeadlineError | ExchangeError)
            views.close(str(failed) if theirs else "")
            return None

        def serve(view: View) -> None:
            self.view_changed(view)
            hand_over(context(), views, view, ())

        try:
            leaves = self._participants.has_joined
            lost = views.finish(self._distribution.progress(), serve, leaves=leaves)
        except PacelineError as error:
            return error
        finally:
            views.close()
            self._views = None
        self._end(views.members, lost)
        return None

    def _end(self, members: tuple[int, ...], lost: tuple[int, ...]) -> None:
        self._participants.members = tuple(rank for rank in members if rank not in lost)
        if self._participants.is_speaker:
            for rank in lost:
                self._tell(rank, self._step, "all steps were done")
