"""The part of one process in a job: `Session` puts together what the calls of a script share.

Each of its parts has one job and gets what it needs as arguments: who takes part
(`participants`), the record of the steps (`step_record`), what is trained (`distribution`), values
that all workers share (`script_group`, `shared_values`), the order of samples (`loader/`), and what
happens when workers or servers fail (`view_changes`).
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim import Optimizer

from paceline import architectures, spec
from paceline.architectures.base import Architecture
from paceline.autograd.scaling import ScaledGradients
from paceline.autograd.trained import Trained
from paceline.collectives.collective import Collective, connect
from paceline.collectives.context import Context
from paceline.errors import SpecError
from paceline.launch import Identity
from paceline.launch.failures import BEGUN
from paceline.record import RunFolder
from paceline.session import gathering, stores
from paceline.session.distribution import Distribution
from paceline.session.join_obstacle import OWN_UPDATES, JoinObstacle
from paceline.session.loader.ledger import Ledger
from paceline.session.loader.positions import Positions
from paceline.session.participants import Participants
from paceline.session.script_group import ScriptGroup
from paceline.session.serving import NO_MORE, SOME, announce
from paceline.session.shared_values import SharedValues
from paceline.session.step_record import StepRecord
from paceline.session.view_changes import ViewChanges
from paceline.spec.workload import GradientUse
from paceline.telemetry import Recorder, StepClock

CPU = torch.device("cpu")
GROUP = -1
"""Part of the store for groups of a session's own: no call of `distribute` has this number."""


class Session:
    """One worker's view of its job. `init` makes one per process."""

    def __init__(
        self,
        identity: Identity,
        *,
        options: spec.Architecture,
        store: Store | None = None,
        folder: RunFolder | None = None,
        measurement: spec.Measurement,
    ) -> None:
        self.identity, self.options, self.store, self.folder = identity, options, store, folder
        self.participants = participants = Participants(identity)
        self.join_obstacle = obstacle = JoinObstacle()
        self.steps = StepRecord(participants, folder, measurement)
        self.group = ScriptGroup(participants, obstacle, self._connect, self._regroups)
        outlive_leader = identity.goes_on and options.is_served and participants.workers > 1
        self.values = SharedValues(participants, store, self.group, outlive_leader=outlive_leader)
        self.positions = Positions(participants, obstacle, store, exclusive=options.exclusive)
        self.distribution = Distribution(
            self.steps, participants, self.group.mean_inside, self._after_step
        )
        self.ledger = Ledger(self.distribution, obstacle)
        self.view_changes = ViewChanges(
            participants, self.steps, self.distribution, self.positions, obstacle, store, folder
        )

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.participants.rank

    @property
    def workers(self) -> int:
        """Number of workers that began the job."""
        return self.participants.workers

    @property
    def step(self) -> int:
        """The step that this worker takes next."""
        return self.participants.step

    @property
    def clock(self) -> StepClock:
        """The clock of the current step."""
        return self.steps.clock

    @property
    def recorder(self) -> Recorder | None:
        """The writer of this member's part of the run; None for a job that is not recorded."""
        return self.steps.recorder

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of the last call of `distribute`; None before the first."""
        return self.distribution.architecture

    @property
    def gradients(self) -> ScaledGradients:
        """The gradients of all that is trained, which may be scaled."""
        return self.distribution.gradients

    def note(self, text: str, kind: str = "note") -> None:
        """Put a line into the record, once for all workers unless it is this worker's own."""
        self.steps.note(text, kind)

    def report_loss(self, loss: torch.Tensor | float) -> None:
        """Record this worker's loss of the current step: the mean over its samples."""
        self.steps.report_loss(loss)

    def context(
        self, device: torch.device, number: int, gradient_use: GradientUse | None = None
    ) -> Context:
        """Return the surroundings of the architecture of the `number`th call of `distribute`."""
        store = None if self.store is None else PrefixStore(f"distribute{number}", self.store)
        context = Context(
            identity=self.identity,
            store=store,
            clock=self.clock,
            device=device,
            note=self.note,
            training=self.distribution,
            membership=self.view_changes,
            deadline_seconds=stores.DEADLINE_SECONDS,
            gradient_use=gradient_use,
        )
        return replace(context, views=self.view_changes.meet(context, self.options))

    def distribute(
        self,
        model: torch.nn.Module,
        *optimizers: Optimizer,
        gradient_use: GradientUse | None = None,
    ) -> tuple[Any, ...]:
        """Train `model` over all workers from here on. See `Context` for `gradient_use`, which a
        loop that knows gives."""
        number = len(self.distribution.trained)
        self.distribution.check(model, optimizers)
        if number > 0:
            if self.participants.has_joined:
                problem = "a worker that joined trains one model, and this is the second."
                raise SpecError("distribute", problem, "start the job with all its workers.")
            self.join_obstacle.close("the job's script trains several models")
        trained = Trained(model, optimizers)
        if trained.device.type == "cuda" and number == 0:
            self.steps.time_device()
        served = self.options.serves_workers
        if served is not None and served.gradients_leave(gradient_use) == "for means":
            self.join_obstacle.close(OWN_UPDATES)
        self._announce(SOME)
        context = self.context(trained.device, number, gradient_use)
        self.distribution.add(trained, architectures.build(self.options, context))
        self.view_changes.join()
        if self.recorder is not None and self.identity.goes_on and number == self.rank == 0:
            self.recorder.note("all members have met", BEGUN)
        return (model, *optimizers)

    def end_together(self) -> None:
        """Stay until no worker needs another one any more: what one does alone may follow."""
        if (error := self.view_changes.leave(None, self._group_context)) is not None:
            raise error

    def close(self, failed: BaseException | None = None) -> None:
        """End this process's part; safe to call twice.

        Raises what broke inside a step and was caught by the script, which trained wrongly then.
        """
        caught, self.distribution.error = None if failed else self.distribution.error, None
        failed = failed or caught
        if self.distribution.architectures:
            self.steps.end_training()
        if self.distribution.architectures and failed is None:
            self._report_end()
        counters = {} if self.recorder is None else self.recorder.member.counters
        self.distribution.close(counters, failed=failed is not None)
        caught = self.view_changes.leave(failed, self._group_context) or caught
        failed = failed or caught
        if failed is None or not self.values.outlive_leader:  # else the others continue
            self._announce(NO_MORE)
        self.distribution.release()
        self.steps.close(failed, self.ledger.num_loaders)
        store, self.store = self.store, None
        if store is not None and failed is None:
            guests = {rank for rank in self.participants.ended if rank >= self.workers}
            gone = {f"worker{rank}" for rank in guests} | self.view_changes.lost_servers
            members = self.participants.members
            gathering.leave(store, self.identity, self.folder, members, gone)
        elif store is not None and self.participants.has_joined:
            stores.give_up(store, self.identity)
        if isinstance(store, stores.JobStore):
            store.close()
        if caught is not None:
            raise caught

    def _report_end(self) -> None:
        """Note who ended after fewer steps, and tell the others how many this worker took."""
        if self.store is None:
            return
        own, taken = self.identity.name, self.step
        for name, steps in self.view_changes.ended().items():
            if steps < taken:  # where steps must match, this was an error before
                self.note(f"{name} ended after {steps} steps, {own} after {taken}", "early")
        try:
            self.store.set(f"ended/{own}", str(taken))
        except dist.DistNetworkError:  # the worker that kept it has failed
            if not self.view_changes.go_on:
                raise

    def _announce(self, what: bytes) -> None:
        """Worker 0 tells the servers; all initial workers say the same where it may fail."""
        is_initial = self.identity.role == "worker" and not self.participants.has_joined
        leads = is_initial and (self.rank == 0 or self.values.outlive_leader)
        if self.store is not None and self.identity.servers and leads:
            announce(self.store, len(self.distribution.trained), what)

    def _after_step(self) -> None:
        self.view_changes.after_step()
        self.join_obstacle.publish(self.identity, self.store)

    def _group_context(self) -> Context:
        return self.context(CPU, GROUP)

    def _connect(self) -> Collective:
        return connect(self._group_context(), "gloo")

    def _regroups(self) -> bool:
        return self.view_changes.go_on
