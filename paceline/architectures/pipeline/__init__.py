"""`pipeline`: layers split over workers, micro-batches flow through (model parallelism).

Worker 0 measures every unit of the model, cuts the row into stages of equal time that fit the
memory (`partition`), and tells the others; each worker fills in the weights of its own stages only
(`models.deferred`), so that a model larger than one worker trains. torch.distributed.pipelining
runs the schedule. A step cannot be taken apart into the script's forward and backward, so this is
for the built-in loop; a script of one's own is refused.
"""

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from paceline import spec
from paceline.architectures.pipeline.measuring import PipelineJob
from paceline.architectures.pipeline.model import PipelineModel
from paceline.autograd.trained import Trained
from paceline.collectives.context import Context
from paceline.collectives.group import interface_of
from paceline.compute.batchwise import unlike_single
from paceline.errors import SpecError
from paceline.wire.gloo_ports import shut_behind

WHERE = "architecture pipeline"

__all__ = ["PipelineArchitecture", "PipelineJob", "PipelineModel", "build"]


class PipelineArchitecture:
    """One worker's side. The model it takes is a `PipelineModel`, which the loop has built."""

    def __init__(self, options: spec.Pipeline, context: Context) -> None:
        self._context = context
        self._model: PipelineModel | None = None

    def distribute(self, trained: Trained) -> None:
        model = trained.model
        if not isinstance(model, PipelineModel):
            problem = "a script that calls its model and backward itself cannot be a pipeline."
            fix = "train it with `paceline train --model module:function`, or choose ring."
            raise SpecError(WHERE, problem, fix)
        self._model, clock = model, self._context.clock
        model.clock = clock
        for optimizer in trained.optimizers:
            optimizer.register_step_pre_hook(lambda *_: clock.ready())
        self._context.note(
            f"stages begin at {', '.join(model.cuts)}; by their measured times the schedule leaves "
            f"workers idle for {model.idle_fraction:.0%} of a step."
        )
        if not model.is_compared:
            self._context.note(
                "the model is too large to be whole on worker0: whether its units compute what its "
                "forward does was not compared."
            )
        if model.sees_batch:
            self._context.note(unlike_single(model.sees_batch, "micro-batch"))

    def take(self, optimizer: Optimizer) -> None:
        pass

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # a step is whole: micro-batches accumulate inside it

    def clip(self, max_norm: float) -> Tensor:
        assert self._model is not None
        return self._model.clip(max_norm)

    def settle(self) -> None:
        if self._model is not None:
            self._model.settle()

    def counters(self) -> dict[str, object]:
        if self._model is None:
            return {}
        sizes = [p.numel() * p.element_size() for p in self._model.rows.parameters()]
        return {
            "place": self._model.place,
            "parameter_bytes": sum(sizes),
            "schedule_idle_fraction": self._model.idle_fraction,
        }

    def close(self, *, failed: bool) -> None:
        if dist.is_initialized():
            for one in dist.distributed_c10d._world.pg_map:  # decision 0004
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            dist.destroy_process_group()


def build(options: spec.Pipeline, context: Context, job: PipelineJob) -> PipelineModel:
    """Join the workers' group and make this worker's stages; every worker calls it at once."""
    identity = context.identity
    shared = context.device.type == "cuda" and (
        min(identity.local_members, identity.workers) > torch.cuda.device_count()
    )
    backend = "nccl" if context.device.type == "cuda" and not shared else "gloo"
    if shared:
        context.note("workers share a GPU: activations travel by gloo through main memory.")
    interface = interface_of(identity.address)
    if backend == "gloo" and interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    assert context.store is not None, "a pipeline has several workers"
    with shut_behind() if backend == "gloo" else nullcontext():  # no value travels in this group
        dist.init_process_group(
            backend,
            store=PrefixStore("pipeline", context.store),
            rank=identity.rank,
            world_size=identity.workers,
            timeout=timedelta(seconds=context.deadline_seconds),
        )
    return PipelineModel(options, context, job)
