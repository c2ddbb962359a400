"""One worker's part of a pipeline: its stages, the step that runs them, and what is exchanged."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import spec
from paceline.architectures.pipeline.cuts import agree_on_cuts, as_row, idle
from paceline.architectures.pipeline.measuring import PipelineJob
from paceline.architectures.pipeline.places import Groups, Places, names_of, owners_of
from paceline.architectures.pipeline.stage import Ends, Stage, schedule, under
from paceline.collectives.collective import Packed
from paceline.collectives.context import Context
from paceline.compute.units import UnitChain
from paceline.data.sampling import part_of


class PipelineModel(nn.Module):
    """One worker's stages, and the schedule that runs them."""

    def __init__(self, options: spec.Pipeline, context: Context, job: PipelineJob) -> None:
        super().__init__()
        identity = context.identity
        self._places = Places(options, identity.workers, identity.rank)
        self._moves = context.device.type == "cuda" and dist.get_backend() == "gloo"
        built, cuts = agree_on_cuts(options, context, job, as_row(options, job), self._places)
        deferred, units = built.deferred, built.units
        stops = [*cuts.starts[1:], len(units)]
        rows = [units[a:b] for a, b in zip(cuts.starts, stops, strict=True)]
        self.cuts, self.is_compared = [row[0].name for row in rows], cuts.is_compared
        self.sees_batch = cuts.sees_batch
        self.idle_fraction = idle(self._places.pipe, cuts.seconds)
        shapes = [torch.empty(s, device="meta", requires_grad=True) for s in cuts.shapes]
        mine = [stage for stage in range(len(rows)) if self._places.pipe.owner(stage) == self.place]
        self._is_first, self._is_last = mine[0] == 0, mine[-1] == len(rows) - 1
        own = [UnitChain(rows[stage]) for stage in mine]
        names = names_of(rows)
        self._groups = Groups(context, self._places, owners_of(rows, names, self._places))
        known = [(names[id(p)], row, name) for row in own for name, p in row.named_in_model()]
        deferred.fill([part for row in own for part in row.parts], context.device)
        for row in own:
            row.to(context.device)  # where the model was built whole, elsewhere
            if job.channels_last:
                row.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.rows = nn.ModuleList(own)
        self._weights = {key: dict(row.named_in_model())[name] for key, row, name in known}
        """This worker's weights, by their first names in the model."""
        self.clock = context.clock
        self._home = torch.device("cpu") if self._moves else context.device
        """Where activations travel from."""
        layout = torch.channels_last if job.channels_last else torch.contiguous_format
        leaves_from = [self._home] * (len(rows) - 1) + [None]
        ends = [
            Ends(row, context.device, leaves_from[stage], layout, cuts.shapes[stage])
            for stage, row in zip(mine, own, strict=True)
        ]
        self.anchors = nn.ParameterList(one.anchor for one in ends if one.anchor is not None)
        stages = [
            Stage(
                lambda: self.clock,
                one,
                stage,
                len(rows),
                self._home,
                input_args=shapes[stage - 1] if stage else job.sample,
                output_args=shapes[stage],
                group=self._groups.pipe,
            )
            for stage, one in zip(mine, ends, strict=True)
        ]
        for stage in stages:
            stage.precision = job.precision
        self._run_schedule = schedule(options, stages, under(job.precision, job.loss))
        self._averaged: Packed | None = None
        self._telling: Any = None

    @property
    def place(self) -> int:
        """This worker's place in its pipeline."""
        return self._places.place

    @property
    def reads(self) -> bool:
        """Whether this worker needs samples: inputs enter the first stage, targets the last."""
        return self._is_first or self._is_last

    def samples_of(self, count: int) -> slice:
        """The part of a global batch that this worker's pipeline takes."""
        each = count // self._places.replicas
        return slice(self._places.replica * each, (self._places.replica + 1) * each)

    def forward(self, counted: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """A whole step's forward and backward passes; the loss, on every worker by the next step.

        `counted` has as many rows as samples this worker answers for in the record.
        """
        self.settle()
        losses: list[Tensor] = []
        arguments = (inputs.to(self._home).contiguous(),) if self._is_first else ()
        wanted = {"target": targets, "losses": losses} if self._is_last else {}
        self.clock.enter("wait")
        self._run_schedule(*arguments, **wanted)
        self.clock.enter("exchange_exposed")
        self._exchange()
        loss = torch.zeros((), device=self._home)
        if losses:
            loss.copy_(torch.stack(losses).mean())
        last, pipe = self._places.last_rank, self._groups.pipe
        self._telling = dist.broadcast(loss, last, group=pipe, async_op=True)
        if loss.is_cuda:
            self.settle()  # orders the streams; stops nobody
        return loss

    def settle(self) -> None:
        """Wait until the loss of the last step is known here too."""
        if self._telling is not None:
            self._telling.wait()
            self._telling = None

    @property
    def counted_part(self) -> Callable[[int], slice]:
        """Which of its pipeline's samples this worker answers for in the record."""
        return part_of(self.place, [1.0] * self._places.pipe.workers)

    def clip(self, max_norm: float) -> Tensor:
        """Bound the norm of the whole gradient, of which each worker has a part; returns it."""
        ties = self._groups.ties  # a weight on several stages is counted by the first that has it
        counted = [p for n, p in self._weights.items() if n not in ties or ties[n][1] == self.place]
        norms = [p.grad.norm() for p in counted if p.grad is not None]
        squared = torch.stack(norms).square().sum() if norms else torch.zeros(())
        squared = squared.to(self._home)
        dist.all_reduce(squared, group=self._groups.pipe)
        norm = squared.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.device))
        return norm

    @torch.no_grad()
    def _exchange(self) -> None:
        """Gradients of weights on several stages are added, those of several pipelines averaged."""
        for name, (group, _) in self._groups.ties.items():
            weight = self._weights.get(name)
            if weight is not None and weight.requires_grad:
                if weight.grad is None:  # it has no part in the loss here, but may have there
                    weight.grad = torch.zeros_like(weight)
                self._reduce(weight.grad, group)
        if self._groups.twins is None:
            return
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not gradients:
            return
        if self._averaged is None:
            self._averaged = Packed(gradients)
        self._averaged.tensors = gradients
        self._reduce(self._averaged.pack(), self._groups.twins)
        self._averaged.buffer.div_(self._places.replicas)
        self._averaged.unpack()

    def _reduce(self, tensor: Tensor, group: Any) -> None:
        passed = tensor.to(self._home)
        dist.all_reduce(passed, group=group)
        if passed is not tensor:
            tensor.copy_(passed)
