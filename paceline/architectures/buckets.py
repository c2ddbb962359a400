"""Gradients averaged over a `Collective` as backward makes them, for `ring` over MPI and `hybrid`.

(`ring` over gloo and NCCL leaves this to torch's own reducer.) Gradients lie end to end in buckets,
the last layer's first, because that is the order in which they come; a full bucket leaves at once.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from paceline.architectures.collective import Collective, place_like, start_equal
from paceline.errors import SpecError

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(number of elements, type, device) -> a flat tensor for one bucket."""


class BucketedArchitecture:
    """One worker's side of any architecture that averages whole gradients in each step."""

    def __init__(
        self, collective: Collective, *, bucket_bytes: int, allocate: Allocate | None = None
    ) -> None:
        self._collective, self._bucket_bytes = collective, bucket_bytes
        self._allocate = allocate or _in_own_memory
        self._buckets: GradientBuckets | None = None

    def distribute(
        self, model: torch.nn.Module, optimizer: Optimizer
    ) -> tuple[torch.nn.Module, Optimizer]:
        start_equal(self._collective, model)
        self._model = model
        self._buckets = GradientBuckets(
            [p for p in model.parameters() if p.requires_grad],
            self._collective,
            self._bucket_bytes,
            self._allocate,
        )
        return model, optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        assert self._buckets is not None
        return self._buckets.paused()

    def clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def settle(self) -> None:
        """Batch-norm statistics differ, as workers see different samples: worker 0's count."""
        start_equal(self._collective, self._model, buffers_only=True)

    def counters(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._collective.close()


class GradientBuckets:
    """The buckets of one model's gradients, and how far this backward pass has filled them."""

    def __init__(
        self,
        parameters: list[Tensor],
        collective: Collective,
        bucket_bytes: int,
        allocate: Allocate,
    ) -> None:
        self._collective = collective
        self._buckets = _deal(parameters, bucket_bytes, allocate)
        self._slot_of = {slot.parameter: slot for bucket in self._buckets for slot in bucket.slots}
        self._exchanging, self._under_way, self._started = True, False, 0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients made inside stay where they are."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def _gradient_ready(self, parameter: Tensor) -> None:
        if not self._exchanging:
            return
        if not self._under_way:
            # Torch's own reducer finishes the same way: when backward() returns, all is averaged.
            Variable._execution_engine.queue_callback(self._finish)
            self._under_way = True
        slot = self._slot_of[parameter]
        slot.fill()
        slot.bucket.num_missing -= 1
        # In the same order on every worker, whatever the order of their gradients.
        while self._started < len(self._buckets) and not self._buckets[self._started].num_missing:
            self._start_next()

    def _start_next(self) -> None:
        self._collective.start(self._buckets[self._started].flat)
        self._started += 1

    def _finish(self) -> None:
        for bucket in self._buckets[self._started :]:
            for slot in bucket.slots:
                slot.fill()  # not reached by this backward pass: accumulated before, or unused
            self._start_next()
        self._collective.finish()
        for bucket in self._buckets:
            bucket.flat.div_(self._collective.weight)
            bucket.hand_out()
        self._under_way, self._started = False, 0


class _Bucket:
    """Gradients of one type, and behind them a mark for each: how many workers have it."""

    def __init__(self, parameters: list[Tensor], allocate: Allocate) -> None:
        first = parameters[0]
        num_elements = sum(p.numel() for p in parameters)
        self.flat = allocate(num_elements + len(parameters), first.dtype, first.device)
        self._marks = self.flat[num_elements:]
        self.slots, offset = [], 0
        for number, parameter in enumerate(parameters):
            place = place_like(self.flat[offset : offset + parameter.numel()], parameter)
            self.slots.append(_Slot(self, parameter, place, self._marks[number : number + 1]))
            offset += parameter.numel()
        self.num_missing = len(self.slots)

    def hand_out(self) -> None:
        """Give each parameter its averaged gradient; None stays None where no worker has one."""
        for slot, used in zip(self.slots, self._marks.tolist(), strict=True):
            slot.parameter.grad = slot.place if used else None
        self.num_missing = len(self.slots)


class _Slot:
    """Where one parameter's gradient lies in its bucket."""

    def __init__(self, bucket: _Bucket, parameter: Tensor, place: Tensor, mark: Tensor) -> None:
        self.bucket, self.parameter, self.place, self.mark = bucket, parameter, place, mark

    def fill(self) -> None:
        gradient = self.parameter.grad
        self.mark.fill_(0 if gradient is None else 1)
        if gradient is None:
            self.place.zero_()
        elif gradient.layout != torch.strided:
            problem = "a gradient is sparse, and this architecture exchanges dense ones."
            raise SpecError("distribute", problem, "build the embedding with sparse=False.")
        elif gradient.data_ptr() != self.place.data_ptr():
            self.place.copy_(gradient)


def _deal(parameters: list[Tensor], bucket_bytes: int, allocate: Allocate) -> list[_Bucket]:
    """Fill buckets of about `bucket_bytes`, one type each, from the last parameter to the first."""
    buckets: list[_Bucket] = []
    filling: list[Tensor] = []
    size_bytes = 0
    for parameter in reversed(parameters):
        own_bytes = parameter.numel() * parameter.element_size()
        full = size_bytes + own_bytes > bucket_bytes or (
            filling and filling[0].dtype != parameter.dtype
        )
        if filling and full:
            buckets.append(_Bucket(filling, allocate))
            filling, size_bytes = [], 0
        filling.append(parameter)
        size_bytes += own_bytes
    return [*buckets, _Bucket(filling, allocate)]


def _in_own_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(num_elements, dtype=dtype, device=device)
