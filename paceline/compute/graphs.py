"""CUDA graphs: a model's forward and backward pass recorded once and replayed in every step.

Starting a kernel takes the host some microseconds, and a small network has hundreds of kernels of
less than that: the device waits for the host. A recorded pass starts with one call. Only what the
device does is recorded, so this is for models whose Python does the same in every step, and for
gradients that are not needed before backward has ended.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

WARMUP_PASSES = 3
"""Libraries choose their algorithms and take their memory in the first passes."""


class RecordedPasses:
    """Forward with loss, and backward, as two recordings; `run` replays both.

    The model is called as ever, so its hooks see each pass begin and end, and its `forward` replays
    while `run` is at work. Weights, buffers and gradients are after the recording what they were.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        precision: Callable[[], AbstractContextManager[object]],
        inputs: Tensor,
        targets: Tensor,
        input_type: torch.dtype | None = None,
        mark_bytes: int = 0,
    ) -> None:
        """`input_type`: what the first layer rounds its input to under this precision, if known.

        The batch is then rounded on its way into the recording, which would only copy it otherwise.
        `mark_bytes`: of gradients, after which their moment is marked; 0 if it is not asked for.
        """
        assert "forward" not in vars(model), "compiled models are not recorded"
        self._model, self._plain = model, model.forward
        self._shape, self._type = inputs.shape, inputs.dtype
        self._inputs = torch.empty_like(inputs, dtype=input_type).copy_(inputs)
        self._targets = targets.clone()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        weights = [p for p in model.parameters() if p.requires_grad]
        with torch.cuda.device(inputs.device), _unchanged(model):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_PASSES):
                    self._pass(loss, precision).backward()
                for weight in weights:
                    weight.grad = None
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads may go on using the device: batches arrive meanwhile.
            common: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(self._forward, **common):
                result = self._pass(loss, precision)
            marks = _Marks(weights, mark_bytes)
            with torch.cuda.graph(self._backward, pool=self._forward.pool(), **common), marks:
                result.backward()
            self._loss = result.detach()
            # Made by the recording, and so written again by every replay.
            self._gradients = [(weight, weight.grad) for weight in weights]
            self.marks = [
                ([(w, w.grad) for w in made if w.grad is not None], event)
                for made, event in marks.made
            ]
            """Weights in the order in which they get their gradients, where these lie, and an event
            that each replay records anew when they are made."""
            del result

    def gradient_of(self, weight: Tensor) -> Tensor | None:
        """Return the memory in which each replay makes a weight's gradient."""
        return next((gradient for one, gradient in self._gradients if one is weight), None)

    def fits(self, inputs: Tensor) -> bool:
        """Return whether a batch is like the one recorded; another one is computed without the
        graph."""
        return inputs.shape == self._shape and inputs.dtype == self._type

    def run(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> Tensor:
        """Both passes of one batch; returns its loss, which the next call overwrites.

        `before` is called when only the weights are lacking; `after` when both passes are on their
        way, in place of handing the gradients to the weights.
        """
        self._targets.copy_(targets)
        self._before = before
        model: Any = self._model
        model.forward = self._replay
        try:
            loss: Tensor = model(inputs)
        finally:
            del model.forward
        self._backward.replay()
        if after is not None:
            after()
            return loss
        for weight, gradient in self._gradients:
            weight.grad = gradient
        return loss

    def _replay(self, inputs: Tensor) -> Tensor:
        self._inputs.copy_(inputs)
        if self._before is not None:
            self._before()
        self._forward.replay()
        return self._loss

    def _pass(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        precision: Callable[[], AbstractContextManager[object]],
    ) -> Tensor:
        with precision():
            return loss(self._plain(self._inputs), self._targets)


class _Marks:
    """Records an event whenever enough gradients are made, while a backward pass is recorded."""

    def __init__(self, weights: list[nn.Parameter], mark_bytes: int) -> None:
        self._weights, self._mark_bytes = weights, mark_bytes
        self._since: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        self.made: list[tuple[list[Tensor], torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._mark_bytes:
            hook = self._weight_made
            self._handles = [w.register_post_accumulate_grad_hook(hook) for w in self._weights]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._since:
            self._mark()

    def _weight_made(self, weight: Tensor) -> None:
        self._since.append(weight)
        if sum(w.numel() * w.element_size() for w in self._since) >= self._mark_bytes:
            self._mark()

    def _mark(self) -> None:
        # External: a node of the recording, seen by those outside it each time it is replayed.
        event = torch.cuda.Event(blocking=True, external=True)
        event.record(torch.cuda.current_stream())
        self.made.append((self._since, event))
        self._since = []


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Passes inside leave buffers and gradients as they were."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
    for parameter, gradient in gradients:
        parameter.grad = gradient
