"""One process's part in a job: the public `distribute`, and what all calls of a script share.

A script's loop stays as it was: hooks on the model and the optimizer tell the clock where the time
goes, and scale gradients where workers take uneven parts of a batch. The built-in loop uses the
same calls, so there is one path to measure.
"""

from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline import architectures, spec
from paceline.architectures.base import Architecture, Follows
from paceline.autograd.backward import AroundBackward
from paceline.autograd.gradients import uncompiled
from paceline.autograd.mixing import mix_in
from paceline.autograd.scaling import ScaledGradients
from paceline.autograd.trained import Trained
from paceline.collectives.context import Context, GradientUse
from paceline.compute.memory import return_freed_memory
from paceline.errors import PacelineError, SpecError
from paceline.launch import Identity
from paceline.launch.failures import BEGUN
from paceline.record import RunFolder, Step
from paceline.record.entries import IN_EVALUATION, NOT_FINITE
from paceline.record.lives import RECOVERY
from paceline.served.swapping import follow_swaps
from paceline.session import gathering, joining, stores
from paceline.session.loader.positions import Positions
from paceline.session.observers.device_clock import DeviceClock
from paceline.session.observers.nonfinite import Numbers
from paceline.session.observers.passes import Passes, Timed
from paceline.session.observers.reach import Reach
from paceline.session.observers.script_profile import ScriptProfile
from paceline.session.observers.seen_loss import SeenLoss, StepLoss
from paceline.session.script_group import INSIDE, Everyone
from paceline.session.serving import NO_MORE, SOME, announce
from paceline.session.survivors import Survivors
from paceline.telemetry import Recorder, StepClock

EVALUATING = "dropout is off, batch norm keeps its statistics; model.train() ends that"
RECENT_STEPS = 20
SETTLED_STEPS = 2
"""After so many, buckets are rebuilt and optimizers have their state: what was freed by then is not
needed again."""


class Session:
    """What a worker knows of its job. Made by `init`, one per process."""

    def __init__(
        self,
        identity: Identity,
        *,
        options: spec.Architecture,
        store: Store | None = None,
        folder: RunFolder | None = None,
        measurement: spec.Measurement,
    ) -> None:
        self.identity, self.options, self.store = identity, options, store
        dilation = _dilation(folder)
        self.clock = StepClock(dilation)
        self.recorder: Recorder | None = None
        self.architectures: list[Architecture] = []
        """One for each call of `distribute`."""
        self.step = 0
        self.gradient_use: GradientUse | None = None
        """See `Context`; set before `distribute` by a loop that knows."""
        self._trained: list[Trained] = []
        self._passes: list[Passes] = []
        self._backward = AroundBackward()
        """Who of the architectures is told that a pass has ended."""
        self.everyone = Everyone(self)
        self.survivors = Survivors(self)
        self.positions = Positions(self)
        self._trained_samples = self._handed_samples = 0
        self._sharded = 0
        self.shares_batches = False
        """It trains on batches that are divided among those who are there."""
        self._closed_to_newcomers = ""
        self._told_newcomers: str | None = None
        self.folder = folder
        self._stack = ExitStack()
        self._loss: Tensor | None = None
        self._seen_loss = SeenLoss()
        self.numbers = Numbers()
        self.reach = Reach()
        self._profile = ScriptProfile.from_environment()
        self._open_step: tuple[Step, Tensor | StepLoss | None, Tensor | None] | None = None
        self.members = tuple(range(self.workers))
        """Ranks of the workers that are there: fewer once one is lost and the rest goes on, more
        once one has joined."""
        self.ended: set[int] = set()
        """Those of them that have ended before this worker, and share no batch any more."""
        self.lost_from: dict[int, int] = {}
        """Lost workers, and the first step that each does not count in, as soon as it is known: by
        the time that the next step is begun."""
        self.start = 0
        """The first step that this worker takes part in."""
        self.recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        """The last steps of this worker, losses not yet known."""
        self.broken: PacelineError | None = None
        """The first error of ours inside a step."""
        self.gradients = ScaledGradients(self._trained, self.remember)
        if folder is not None:
            self.recorder = Recorder(
                folder,
                name=identity.name,
                role=identity.role,
                host=identity.host,
                owns_interfaces=identity.owns_interfaces,
                sample_seconds=measurement.sample_seconds,
                warmup_steps=measurement.warmup_steps,
                dilation=dilation,
            )
            self._stack.enter_context(self.recorder)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.identity.rank

    @property
    def workers(self) -> int:
        """How many there were in the beginning."""
        return self.identity.founders or self.identity.workers

    @property
    def has_joined(self) -> bool:
        """This worker came to a job that ran."""
        return self.identity.has_joined

    @property
    def architecture(self) -> Architecture | None:
        """The one of the last call of `distribute`; None before the first."""
        return self.architectures[-1] if self.architectures else None

    @property
    def models(self) -> list[torch.nn.Module]:
        """As given to `distribute`, in order."""
        return [trained.model for trained in self._trained]

    @property
    def speaks_for_all(self) -> bool:
        """One worker does what is done once for all: worker 0 until it ends or is lost."""
        return self.identity.role == "worker" and self.rank == self._speaker

    @property
    def _speaker(self) -> int:
        return min((r for r in self.there if r not in self.ended), default=self.rank)

    @property
    def sharing(self) -> tuple[int, ...]:
        """The workers among which a batch is divided."""
        return tuple(rank for rank in self.members if rank not in self.ended)

    @property
    def there(self) -> tuple[int, ...]:
        """The workers that take part in the step that comes next: all who do agree on it, for who
        was lost before is known by then. The batch may still be divided with more."""
        step, lost = self.step, self.lost_from
        return tuple(rank for rank in self.members if lost.get(rank, step) >= step)

    @property
    def leader(self) -> int:
        """Who draws for all, and has drawn though it may have ended."""
        return min(self.there, default=self.rank)

    def note(self, text: str, kind: str = "note") -> None:
        """Put a line into the record, once for all workers unless it is this worker's own."""
        if self.recorder is not None and (self.rank == self._speaker or kind != "note"):
            self.recorder.note(text, kind, self.step)

    def close(self, failed: BaseException | None = None) -> None:
        """End this process's part; safe to call twice.

        Raises what broke inside a step and was caught by the script, which trained wrongly then.
        """
        caught, self.broken = (None, None) if failed else (self.broken, None)
        failed = failed or caught
        self._write_open_step()
        if self.recorder is not None and self.architectures:
            self.recorder.member.paused_seconds = self.clock.end_training()
        if self.architectures and failed is None and self.store is not None:
            for name, steps in self._ended().items():
                if steps < self.step:  # where steps must match, this was an error before
                    self.note(
                        f"{name} ended after {steps} steps, {self.identity.name} after {self.step}",
                        "early",
                    )
            try:
                self.store.set(f"ended/{self.identity.name}", str(self.step))
            except dist.DistNetworkError:  # the one who kept it is lost
                if not self.survivors.go_on:
                    raise
        while self.architectures:
            architecture = self.architectures.pop()
            if self.recorder is not None:
                self.recorder.member.counters.update(architecture.counters())
            architecture.close(failed=failed is not None)
        caught = self.survivors.leave(failed) or caught
        failed = failed or caught
        if failed is None or not self.has_successors:  # else the others go on
            self._announce(NO_MORE)
        stack, self._stack = self._stack, ExitStack()
        if self.recorder is not None and self.identity.role == "worker":
            counts = {"distributed": len(self._trained), "sharded": self._sharded}
            counts["losses_seen"] = self._seen_loss.count
            self.recorder.member.counters["script"] = counts
            if self.reach.counts:
                self.recorder.member.counters["reach"] = self.reach.counts
        stack.__exit__(type(failed) if failed else None, failed, None)
        store, self.store = self.store, None
        if store is not None and failed is not None and self.has_joined:
            stores.give_up(store, self.identity)
        if store is not None and failed is None:
            folder, name = self.folder, self.identity.name
            sent = gathering.pack(folder, name) if folder is not None else ""
            guests = {rank for rank in self.ended if rank >= self.workers}
            gone = {f"worker{rank}" for rank in guests} | self.survivors.lost_servers
            records = stores.leave(store, self.identity, self.members, sent, gone)
            if folder is not None:
                gathering.unpack(folder, records)
        if isinstance(store, stores.JobStore):
            store.close()
        if caught is not None:
            raise caught

    def context(self, device: torch.device, number: int) -> Context:
        """What the architecture of the `number`th call of `distribute` may use."""
        context = self._plain_context(device, number)
        return replace(context, crew=self.survivors.meet(context))

    def _plain_context(self, device: torch.device, number: int) -> Context:
        store = None if self.store is None else PrefixStore(f"distribute{number}", self.store)
        return Context(
            identity=self.identity,
            store=store,
            clock=self.clock,
            device=device,
            note=self.note,
            deadline_seconds=stores.DEADLINE_SECONDS,
            weight=lambda: self.gradients.scale,
            mean=lambda value: self.everyone.mean(value, INSIDE),
            ended=self._ended,
            members_changed=self.survivors.members_changed,
            left_out=self.survivors.leave_out,
            lost_from=self.lost_from.__setitem__,
            server_lost=self.survivors.server_lost,
            starts_at=self._starts_at,
            broke=self.remember,
            after_backward=self._backward.after.append,
            progress=self.survivors.progress,
            makes_again=lambda: self.survivors.makes_again,
            gradient_use=self.gradient_use,
            regrouped=self.survivors.regrouped,
        )

    def distribute(self, model: torch.nn.Module, *optimizers: Optimizer) -> tuple[Any, ...]:
        if not optimizers:
            fix = "call paceline.distribute(model, optimizer), with every optimizer of the model."
            raise SpecError("distribute", "it was given a model without an optimizer.", fix)
        self._refuse_twice(model, optimizers)
        for optimizer in optimizers:
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                name = type(optimizer).__name__
                problem = f"{name} has not called the __init__ of torch's Optimizer."
                fix = "call super().__init__(params, defaults) in it, or give the one inside it."
                raise SpecError("distribute", problem, fix)
        if self.has_joined and self._trained:
            problem = "a worker that joined trains one model, and this is the second."
            raise SpecError("distribute", problem, "start the job with all its workers.")
        if self._trained:
            self.close_to_newcomers("the job's script trains several models")
        number, trained = len(self._trained), Trained(model, optimizers)
        if trained.device.type == "cuda" and not self._trained:
            self.clock = DeviceClock()
        self._announce(SOME)
        architecture = architectures.build(self.options, self.context(trained.device, number))
        self._trained.append(trained)
        self.architectures.append(architecture)
        architecture.distribute(trained)
        self._passes.append(Passes(self.clock, lambda: self.gradients.scale != 0.0))
        mix_in(model, Timed, _paceline_passes=self._passes[-1])
        for optimizer in optimizers:
            self._follow(optimizer)
        if self._profile is not None:
            self._profile.watch(model, optimizers[-1])
        if number == 0 and self.recorder is not None:
            self.numbers.watch(trained.tensors)
            self.reach.watch(trained)
            if self._seen_loss.is_wanted(self.folder):
                self._backward.before.append(self._seen_loss.look)
        self.gradients.watch_more()
        if number == 0:
            if self.workers > 1 or isinstance(architecture, Follows):
                self._backward.before.append(self._before_backward)
            self._stack.callback(self._backward.watch())
            self._stack.callback(follow_swaps())
        if self.workers > 1 and number == 0:
            handle = register_optimizer_step_pre_hook(uncompiled(self._meet))
            self._stack.callback(handle.remove)
        return_freed_memory()
        if self.recorder is not None and self.identity.goes_on and number == self.rank == 0:
            self.recorder.note("all members have met", BEGUN)
        return (model, *optimizers)

    def remember(self, error: PacelineError) -> None:
        """An exchange broke inside a step: a script that catches it has trained wrongly, and must
        not end as if it had not."""
        self.broken = self.broken or error

    def _before_backward(self, *_: Any) -> None:
        try:
            for architecture in self.architectures:
                if isinstance(architecture, Follows):
                    architecture.follow()
        except PacelineError as error:
            self.remember(error)
            raise
        self.gradients.watch_more()

    def _follow(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(uncompiled(lambda *_: self.clock.enter("update")))
        optimizer.register_step_post_hook(uncompiled(self._after_step))
        self._last_optimizer = optimizer

    def _meet(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer steps: one that `distribute` was not given joins those of its model."""
        if any(known is optimizer for trained in self._trained for known in trained.optimizers):
            return
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        ours = {id(tensor) for tensor in tensors}
        for trained, architecture in zip(self._trained, self.architectures, strict=False):
            if any(id(tensor) in ours for tensor in trained.everything()):
                architecture.take(optimizer)
                trained.optimizers.append(optimizer)
                self._follow(optimizer)
                return
        if any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
            problem = (
                "an optimizer that it was not given updates parameters of no distributed model."
            )
            fix = "give it: paceline.distribute(model, optimizer, another)."
            raise SpecError("distribute", problem, fix)

    def _refuse_twice(self, model: torch.nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        for before in self._trained:
            again = model is before.model or any(o in before.optimizers for o in optimizers)
            if again:
                problem = "this model or optimizer was distributed before."
                fix = "call it once for each model; an optimizer made later joins when it steps."
                raise SpecError("distribute", problem, fix)

    def _announce(self, what: bytes) -> None:
        """Worker 0 tells the servers; all founders say the same where it may be lost."""
        founds = self.identity.role == "worker" and not self.has_joined
        leads = founds and (self.rank == 0 or self.has_successors)
        if self.store is not None and self.identity.servers and leads:
            announce(self.store, len(self._trained), what)

    @property
    def has_successors(self) -> bool:
        """The store outlives worker 0."""
        return isinstance(self.store, stores.JobStore) and self.store.has_successors

    @property
    def samples(self) -> int:
        """Trained on so far by this worker, those of the current step too."""
        return self._trained_samples + self.samples_of_step

    @property
    def samples_of_step(self) -> int:
        if not self._passes:
            return 0
        passes = self._passes[-1]
        return passes.samples if passes.is_called or self.step == 0 else self._handed_samples

    def hand_samples(self, count: int) -> None:
        """So many are in the batch that a loader hands to the script."""
        if self.is_training and torch.is_grad_enabled():
            self._handed_samples += count

    @property
    def is_training(self) -> bool | None:
        """Whether a distributed model is in training mode; None before there is one."""
        return any(model.training for model in self.models) if self._trained else None

    def count_shard(self) -> None:
        """The script divides a loader among the workers."""
        self._sharded += 1

    @property
    def is_closed_to_newcomers(self) -> bool:
        """Nobody can join any more."""
        return bool(self._closed_to_newcomers)

    def close_to_newcomers(self, why: str) -> None:
        """Nobody can join any more, and why. The first reason is the one told."""
        self._closed_to_newcomers = self._closed_to_newcomers or why

    def _tell_newcomers(self) -> None:
        """Worker 0 leaves word of what its steps have shown, for those who ask for a place."""
        why = self._closed_to_newcomers or ("" if self.shares_batches else joining.UNDIVIDED)
        if why == self._told_newcomers or self.rank != 0 or not self.identity.servers:
            return
        assert self.store is not None, "a job with servers has a store"
        self.store.set(joining.OBSTACLE, why)
        self._told_newcomers = why

    def report_loss(self, loss: Tensor | float) -> None:
        """Give the record this worker's loss of the current step: the mean over its samples."""
        loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        # From a GPU it travels behind the script's back; by the time the step is over it is here.
        self._loss = loss.to("cpu", non_blocking=True)

    def begin_again(self) -> None:
        """The step is made again from its batch on; what was spent on it is recovery."""
        self.clock.begin_again(RECOVERY)
        for passes in self._passes:
            passes.samples = 0
        self._seen_loss.forget()

    def _starts_at(self, step: int) -> None:
        self.start = self.step = step

    def _ended(self) -> dict[str, int]:
        """Workers that have ended well, and after how many steps."""
        names = [f"worker{rank}" for rank in self.members if rank != self.rank]
        store = self.store
        if store is None:
            return {}
        try:
            found = {n: int(store.get(f"ended/{n}")) for n in names if store.check([f"ended/{n}"])}
        except dist.DistNetworkError:  # worker 0 keeps it, and has waited for the others in vain
            found = {"worker0": self.step}
        return found

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """With several optimizers a step ends with the one that was distributed last."""
        self.clock.enter("other")
        if optimizer is not self._last_optimizer:
            return
        self.gradients.watch_more()
        in_evaluation = self._passes[-1].trains_in_evaluation
        training = self._trained[-1].model.training
        samples = self._passes[-1].take_samples(is_training=training)
        handed, self._handed_samples = self._handed_samples, 0
        if not self._passes[-1].is_called:
            samples = handed
        entry = self.clock.end_step(self.step, samples)
        if self._passes[-1].trains_in_evaluation and not in_evaluation:
            text = f"from step {self.step} on it trains in evaluation mode: {EVALUATING}"
            self.note(text, IN_EVALUATION)
        rate = optimizer.param_groups[0].get("lr")
        entry.learning_rate = None if rate is None else float(rate)
        self.recent.append(entry)
        self._write_open_step()
        loss = self._seen_loss.unless(self._loss, self._trained)
        self._open_step = (entry, loss, self.numbers.take())
        self._loss = None
        self.reach.after(self.step, self._trained[:1])
        self.step += 1
        self._trained_samples += entry.samples
        for passes in self._passes:
            passes.samples = 0
        self.survivors.divide_anew()
        self._tell_newcomers()
        if len(self.recent) == SETTLED_STEPS:
            return_freed_memory()

    def _write_open_step(self) -> None:
        """A step is written one step late, when reading its loss no longer stalls a GPU."""
        if self._open_step is not None:
            entry, loss, seen = self._open_step
            self.clock.complete(entry)
            entry.loss = None if loss is None else float(loss)
            complaint = self.numbers.complaint(self.identity.name, entry.step, entry.loss, seen)
            if self.recorder is not None:
                if complaint:
                    self.recorder.note(complaint, NOT_FINITE, entry.step)
                self.recorder.add_step(entry)
        self._open_step = None


def _dilation(folder: RunFolder | None) -> float:
    """How many times slower than reported this job runs; only the tunnel slows anything."""
    experiment = folder.experiment() if folder is not None else spec.Experiment()
    return experiment.cluster.dilation if experiment.engine == "tunnel" else 1.0
