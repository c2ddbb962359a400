"""`average`: local steps, then weights averaged over the workers, every H steps.

H = 1 with plain SGD is `ring`. An outer optimizer makes it DiLoCo: the way from the last agreed
weights to the workers' mean is a gradient, and Nesterov momentum steps along it. With `overlap` the
sum of one round travels during the local steps of the next, and what it changes is added to the
weights when that round ends: always at the same step, so a run repeats exactly.

Between two rounds every worker holds weights of its own. A script that looks at them as a whole
(`eval()`, `state_dict()`) gets the mean: a round out of turn, which all workers must ask for alike.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline import spec
from paceline.autograd.gradients import uncompiled
from paceline.autograd.mixing import mix_in
from paceline.autograd.trained import Trained
from paceline.collectives.collective import Collective, Packed, connect, flatten, start_equal
from paceline.collectives.context import Context
from paceline.collectives.group import ended_early
from paceline.collectives.view_collective import ExchangeVoid
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.actions import AllReduce, Event, Usable
from paceline.protocol.collectives import (
    BESIDE,
    SHAPES,
    WEIGHTS,
    Agree,
    AverageMachine,
    Reduced,
    Remain,
    Settle,
)
from paceline.protocol.collectives import LocalStepTaken as LocalStep


class AverageArchitecture:
    """Everybody trains alone for a while; then all take the mean."""

    def __init__(
        self, options: spec.Average, context: Context, collective: Collective | None = None
    ) -> None:
        self._options, self._context = options, context
        self._collective = collective or connect(context, options.backend)
        self._parts: list[Rounds] = []
        if context.views is not None:
            context.views.entry_every = options.every

    def distribute(self, trained: Trained) -> None:
        start_equal(self._collective, trained.everything())
        self._trained = trained
        buffers = flatten(trained.model.buffers())
        for optimizer in trained.optimizers:
            part = Rounds(self._options, self._context, self._collective, optimizer, buffers)
            self._parts.append(part)
            optimizer.register_step_pre_hook(uncompiled(self._before_step))
            optimizer.register_step_post_hook(uncompiled(part.after_step))
            buffers = []  # they go with the first
        self._take_in()
        self._undo = mix_in(trained.model, Settling, _paceline_settle=self.settle)

    def take(self, optimizer: Optimizer) -> None:
        """Steps that are not counted would never be averaged."""
        problem = "an optimizer that distribute was not given updates the model."
        fix = "give it all of them: paceline.distribute(model, optimizer, another)."
        raise SpecError("architecture average", problem, fix)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # steps exchange, not backward passes

    def clip(self, max_norm: float) -> Tensor:
        """Bounds this worker's own gradient: there is no averaged one."""
        return torch.nn.utils.clip_grad_norm_(self._trained.tensors, max_norm)

    def settle(self) -> None:
        """A round out of turn where local steps were taken since the last: one model to look at."""
        for part in self._parts:
            part.settle()

    def state(self) -> dict[str, Any]:
        """Where the rounds are; and each worker's own momentum, which is never averaged alone."""
        return {
            "rounds": [part.state() for part in self._parts],
            "optimizers": [part.optimizer.state_dict() for part in self._parts],
        }

    def restore(self, state: dict[str, Any], *, own: bool) -> None:
        for part, kept, optimizer in zip(
            self._parts, state["rounds"], state["optimizers"], strict=True
        ):
            part.restore(kept)
            if own:
                part.optimizer.load_state_dict(optimizer)

    def counters(self) -> dict[str, object]:
        """Bytes are what a ring all-reduce sends per worker: 2(n-1)/n of what is summed."""
        workers = len(self._collective.members)
        per_byte = 2 * (workers - 1) / workers
        sent = round(sum(part.exchanged_bytes for part in self._parts) * per_byte)
        by_ring = round(sum(part.steps * part.size_bytes for part in self._parts) * per_byte)
        return {
            "rounds": sum(part.rounds for part in self._parts),
            "exchanged_bytes": sent,
            "exchanged_bytes_by_ring": by_ring,
            "saved_bytes": by_ring - sent,
        }

    def close(self, *, failed: bool) -> None:
        """Workers that end go along with a last round: one of them may be saving the mean."""
        self._undo()
        if not failed:
            self.settle()
        self._collective.close()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._trained.update() or self._is_outdated(optimizer):
            self._take_in()
        for part in self._parts:
            if part.optimizer is optimizer:
                part.before_step()

    def _is_outdated(self, optimizer: Optimizer) -> bool:
        """The optimizer was given more since its last step."""
        part = next(part for part in self._parts if part.optimizer is optimizer)
        return any(id(t) not in part.ever for t in _tensors_of(optimizer) if t.requires_grad)

    def _take_in(self) -> None:
        """Average what is trained now, too; what no optimizer updates goes with the first."""
        updated = {id(t) for part in self._parts for t in _tensors_of(part.optimizer)}
        rest = [tensor for tensor in self._trained.tensors if id(tensor) not in updated]
        for part in self._parts:
            part.take_in([*(t for t in _tensors_of(part.optimizer) if t.requires_grad), *rest])
            rest = []


class Rounds:
    """What one optimizer updates, averaged after its steps: others' weights may be in use by a
    graph that is still to be differentiated."""

    def __init__(
        self,
        options: spec.Average,
        context: Context,
        collective: Collective,
        optimizer: Optimizer,
        buffers: list[Packed],
    ) -> None:
        self.optimizer = optimizer
        self.ever: dict[int, Tensor] = {}
        """All that was ever trained: what is frozen later was changed before."""
        self.exchanged_bytes = 0
        self._options, self._context, self._collective = options, context, collective
        self._buffers, self._weights, self._state = buffers, list[Packed](), list[Packed]()
        self._sent: list[Tensor] = []
        """What this worker had put into the round that is under way, overlapped."""
        self._machine = self._machine_at(0)
        self._under_way = AllReduce(WEIGHTS, ())
        self._number = torch.zeros(1)
        """What travels with it: its tag, or how much state there is."""

    def _machine_at(self, step: int) -> AverageMachine:
        return AverageMachine(
            self._collective.members,
            every=self._options.every,
            overlap=self._options.overlap,
            buffers=bool(self._buffers),
            state=self._options.state,
            outer=self._options.outer != "none",
            step=step,
        )

    @property
    def steps(self) -> int:
        return self._machine.step

    @property
    def rounds(self) -> int:
        return self._machine.rounds

    @property
    def size_bytes(self) -> int:
        return sum(flat.size_bytes for flat in self._weights)

    def take_in(self, tensors: Iterable[Tensor]) -> None:
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in self.ever}
        if self.ever and not new:
            return
        if self.ever and (self._options.outer != "none" or self._sent):
            problem = "the script trains other parameters than in the first step."
            fix = "leave out outer and overlap, or train them all from the start."
            raise SpecError("architecture average", problem, fix)
        self.ever |= new
        self._weights = flatten(self.ever.values())
        self._outer = _Outer(self._options, self._weights)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "outer": self._outer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._machine = self._machine_at(int(state["steps"]))
        self._outer.restore(state["outer"])

    def before_step(self) -> None:
        if not self._outer.has_started:
            self._outer.start()

    def after_step(self, *_: Any) -> None:
        began, rounds = time.monotonic(), self.rounds
        self._tell(LocalStep())
        if self.rounds > rounds:
            self._context.clock.charge("exchange_exposed", time.monotonic() - began)

    def settle(self) -> None:
        self._tell(Settle())

    @torch.no_grad()
    def _tell(self, event: Event) -> None:
        """Do what the machine decides, and wait for a round where it does."""
        self._do(Remain(self._collective.members))
        self._do(event)
        while self._machine.waits:
            self._do(self._ended())

    def _do(self, event: Event) -> None:
        for action in self._machine.handle(event):
            match action:
                case AllReduce():
                    self._start(action)
                case Usable(bucket):
                    self._take(bucket)
                case Agree():
                    self._agree(late=action.late)

    def _start(self, action: AllReduce) -> None:
        """Begin a sum, or make it again with the values as they were: workers were lost."""
        self._under_way = action
        if action.bucket == SHAPES:
            self._find_state()
        flats = self._flats()
        for flat in flats:
            flat.pack()
        if action.bucket == WEIGHTS and self._sent:
            for flat, values in zip(flats, self._sent, strict=True):
                flat.buffer.copy_(values)
        elif action.bucket == WEIGHTS and self._machine.flies:
            self._sent = [flat.buffer.clone() for flat in flats]
        if action.bucket != BESIDE:
            value = self._num_state if action.bucket == SHAPES else action.tag
            self._number = torch.tensor([value], dtype=torch.float64, device=self._context.device)
            self._collective.start(self._number)
        for flat in flats:
            self._collective.start(flat.buffer)

    def _ended(self) -> Event:
        """Wait for the sum under way, and make a mean of it."""
        bucket, flats, tags = self._under_way.bucket, self._flats(), 0
        try:
            self._collective.finish()
        except ExchangeVoid:
            for flat in flats:
                flat.renew()
            return Remain(self._collective.members, void=True)
        summed = self._collective.summed
        for flat in flats:
            flat.buffer.div_(summed)
            self.exchanged_bytes += flat.size_bytes
        if bucket == WEIGHTS:
            tags = int(self._number)
            ended = self._context.membership.ended() if tags != self._under_way.tag * summed else {}
            if ended:
                raise ended_early(ended, self._context.identity.name)
        return Reduced(bucket, tags, summed)

    def _flats(self) -> list[Packed]:
        """Of the sum under way."""
        beside = [*self._buffers, *self._state]
        return {WEIGHTS: self._weights, BESIDE: beside, SHAPES: []}[self._under_way.bucket]

    def _take(self, bucket: int) -> None:
        """A mean of what goes beside the weights is there."""
        if bucket == SHAPES and float(self._number) != self._num_state * self._collective.summed:
            problem = "workers' optimizers hold state for different parameters"
            raise ExchangeError(f"{problem}; average without state=true, or use every parameter.")
        for flat in self._flats():
            flat.unpack()

    def _agree(self, *, late: bool) -> None:
        """Take the mean; late, bring in what it differs by from what this worker had sent."""
        targets, sent, self._sent = self._outer.step(), self._sent, []
        for number, (flat, target) in enumerate(zip(self._weights, targets, strict=True)):
            if late:
                flat.add(target - sent[number])
            else:
                flat.unpack(target)

    @property
    def _num_state(self) -> int:
        """A parameter unused by some workers only has state there only; sums would not match."""
        return sum(flat.buffer.numel() for flat in self._state)

    def _find_state(self) -> None:
        """Momentum and the like; counters of steps are not averaged."""
        tensors = [
            value
            for parameter in _tensors_of(self.optimizer)
            for value in self.optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.ndim
        ]
        known = [tensor for flat in self._state for tensor in flat.tensors]
        if {id(tensor) for tensor in tensors} != {id(tensor) for tensor in known}:
            self._state = flatten(tensors)  # the first round, or a checkpoint was loaded


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


class Settling(torch.nn.Module):
    """Mixed into the model: whoever looks at the weights as a whole sees the mean."""

    _paceline_settle: Any

    def train(self, mode: bool = True) -> Any:
        if not mode and self.training:
            type(self)._paceline_settle()
        return super().train(mode)

    def state_dict(self, *args: Any, **named: Any) -> Any:
        type(self)._paceline_settle()
        return super().state_dict(*args, **named)


class _Outer:
    """Where a round's mean leads: to itself, or as far as the outer optimizer goes."""

    def __init__(self, options: spec.Average, weights: list[Packed]) -> None:
        self._options, self._weights = options, weights
        self.has_started = False
        self._agreed: list[Tensor] = []
        self._optimizer: SGD | None = None

    def state(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        return {"agreed": self._agreed, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        self.start()
        if self._optimizer is not None:
            for agreed, kept in zip(self._agreed, state["agreed"], strict=True):
                agreed.copy_(kept)
            self._optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def start(self) -> None:
        """The weights before the first step are agreed on."""
        self.has_started = True
        if self._options.outer == "nesterov":
            self._agreed = [flat.pack().clone() for flat in self._weights]
            self._optimizer = SGD(
                self._agreed,
                lr=self._options.outer_learning_rate,
                momentum=self._options.outer_momentum,
                nesterov=True,
            )

    def step(self) -> list[Tensor]:
        """The weights agreed on; called when the flats' buffers hold the mean."""
        if self._optimizer is None:
            return [flat.buffer for flat in self._weights]
        for agreed, flat in zip(self._agreed, self._weights, strict=True):
            agreed.grad = agreed - flat.buffer
        self._optimizer.step()
        return self._agreed
