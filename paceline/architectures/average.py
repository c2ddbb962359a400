"""`average`: local steps, then weights averaged over the workers, every H steps.

H = 1 with plain SGD is `ring`. An outer optimizer makes it DiLoCo: the way from the last agreed
weights to the workers' mean is a gradient, and Nesterov momentum steps along it. With `overlap` the
sum of one round travels during the local steps of the next, and what it changes is added to the
weights when that round ends: always at the same step, so a run repeats exactly.

Between two rounds every worker holds weights of its own. A script that looks at them as a whole
(`eval()`, `state_dict()`) gets the mean: a round out of turn, which all workers must ask for alike.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline import spec
from paceline.architectures.base import Context
from paceline.architectures.collective import Collective, Flat, connect, flatten, start_equal
from paceline.architectures.elastic import Regrouped
from paceline.architectures.group import ended_early
from paceline.architectures.mixing import mix_in
from paceline.architectures.trained import Trained
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.actions import Action, AllReduce, Event
from paceline.protocol.collectives import Agree, AverageMachine, Reduced, Settle
from paceline.protocol.collectives import Trained as LocalStep


class AverageArchitecture:
    """Everybody trains alone for a while; then all take the mean."""

    def __init__(
        self, options: spec.Average, context: Context, collective: Collective | None = None
    ) -> None:
        self._options, self._context = options, context
        self._collective = collective or connect(context, options.backend)
        self._parts: list[Rounds] = []

    def distribute(self, trained: Trained) -> None:
        start_equal(self._collective, trained.everything())
        self._trained = trained
        for optimizer in trained.optimizers:
            part = Rounds(self._options, self._context, self._collective, optimizer)
            self._parts.append(part)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(part.after_step)
        self._parts[0].buffers = flatten(trained.model.buffers())
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
    ) -> None:
        self.optimizer = optimizer
        self.ever: dict[int, Tensor] = {}
        """All that was ever trained: what is frozen later was changed before."""
        self.buffers: list[Flat] = []
        self.exchanged_bytes = 0
        self._options, self._context, self._collective = options, context, collective
        self._machine = self._machine_at(0)
        self._weights: list[Flat] = []
        self._state: list[Flat] = []
        self._sent: list[Tensor] = []
        """What this worker had put into the round that is under way, overlapped."""
        self._round = AllReduce(0, ())
        self._tag: Tensor | None = None
        """Of the round under way; None where this worker is alone."""

    def _machine_at(self, step: int) -> AverageMachine:
        every, overlap = self._options.every, self._options.overlap
        return AverageMachine(self._collective.members, every=every, overlap=overlap, step=step)

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
        self._do(self._machine.handle(event))
        while self._machine.waits:
            self._do(self._machine.handle(self._reduced()))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case AllReduce():
                    self._begin(action)
                case Agree():
                    self._agree(late=action.late)

    @property
    def _is_alone(self) -> bool:
        """One's own weights are the mean."""
        return len(self._collective.members) == 1 and self._options.outer == "none"

    def _begin(self, action: AllReduce) -> None:
        """Start a round: the weights, behind what is averaged at once."""
        self._round, self._tag = action, None
        if self._is_alone:
            return
        self._average([*self.buffers, *self._optimizer_state()])
        weights = [flat.pack() for flat in self._weights]
        if self._options.overlap and action.tag > 0:
            self._sent = [buffer.clone() for buffer in weights]
        self._start([self._make_tag(), *weights])

    def _reduced(self) -> Reduced:
        """Wait for the round under way."""
        if self._tag is None:
            return Reduced(self._round.bucket, self._round.tag, 1)
        self._finish(self._weights, self._begin_again)
        tags, summed = int(self._tag), self._collective.summed
        ended = self._context.ended() if tags != self._round.tag * summed else {}
        if ended:
            raise ended_early(ended, self._context.identity.name)
        return Reduced(self._round.bucket, tags, summed)

    def _begin_again(self) -> list[Tensor]:
        """The values of the round under way, in other buffers."""
        for flat in self._weights:
            flat.renew()
        for flat, values in zip(self._weights, self._sent, strict=False):
            flat.buffer.copy_(values)
        packed = [flat.buffer if self._sent else flat.pack() for flat in self._weights]
        return [self._make_tag(), *packed]

    def _agree(self, *, late: bool) -> None:
        """Take the mean; late, bring in what it differs by from what this worker had sent."""
        if self._tag is None:
            return
        targets, sent, self._sent = self._outer.step(), self._sent, []
        for number, (flat, target) in enumerate(zip(self._weights, targets, strict=True)):
            if late:
                flat.add(target - sent[number])
            else:
                flat.unpack(target)

    def _make_tag(self) -> Tensor:
        """Travels with the weights and shows whether all workers average for the same reason."""
        self._tag = torch.tensor(
            [self._round.tag], dtype=torch.float64, device=self._context.device
        )
        return self._tag

    def _average(self, flats: Iterable[Flat]) -> None:
        """Replace the tensors by their mean over the workers; the buffers hold it too."""
        flats = list(flats)

        def again() -> list[Tensor]:
            for flat in flats:
                flat.renew()
            return [flat.pack() for flat in flats]

        self._start(flat.pack() for flat in flats)
        self._finish(flats, again)
        for flat in flats:
            flat.unpack()

    def _start(self, values: Iterable[Tensor]) -> None:
        for value in values:
            self._collective.start(value)

    def _finish(self, flats: Iterable[Flat], again: Callable[[], list[Tensor]]) -> None:
        """Wait for the sums, and make means of them; `again`: their values as they were, in other
        buffers, where a worker was lost meanwhile."""
        while True:
            try:
                self._collective.finish()
                break
            except Regrouped:
                self._start(again())
        for flat in flats:
            flat.buffer.div_(self._collective.summed)
            self.exchanged_bytes += flat.size_bytes

    def _optimizer_state(self) -> list[Flat]:
        """Momentum and the like, where the user wants them averaged; counters of steps are not."""
        if not self._options.state:
            return []
        tensors = [
            value
            for parameter in _tensors_of(self.optimizer)
            for value in self.optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.ndim
        ]
        known = [tensor for flat in self._state for tensor in flat.tensors]
        if {id(tensor) for tensor in tensors} != {id(tensor) for tensor in known}:
            self._state = flatten(tensors)  # the first round, or a checkpoint was loaded
            self._check_state()
        return self._state

    def _check_state(self) -> None:
        """A parameter unused by some workers only has state there only; sums would not match."""
        own = float(sum(flat.buffer.numel() for flat in self._state))
        totals: list[Tensor] = []

        def total() -> list[Tensor]:
            totals[:] = [torch.tensor([own], dtype=torch.float64, device=self._context.device)]
            return totals

        self._start(total())
        self._finish([], total)
        if float(totals[0]) != own * self._collective.summed:
            problem = "workers' optimizers hold state for different parameters"
            raise ExchangeError(f"{problem}; average without state=true, or use every parameter.")


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

    def __init__(self, options: spec.Average, weights: list[Flat]) -> None:
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
