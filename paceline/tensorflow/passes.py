"""What the calls of a Keras model tell: when forward and backward begin, samples, and the loss.

Hooks on the model's own `call` and `compute_loss`, so `fit` and the script's own loops are seen
alike. A forward pass counts as training when it is called with `training=True`.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from paceline.session.session import Session
from paceline.tensorflow import graph


class KerasPasses:
    """The forward passes of one model since its last step."""

    def __init__(self, session: Session, model: Any) -> None:
        self._session = session
        self._size: Any = None
        self._loss: Any = None
        self._has_training = "training" in inspect.signature(model.call).parameters
        hook(model, "call", self._called)
        hook(model, "compute_loss", self._lost)

    def take(self) -> tuple[Any, Any]:
        """The size of this worker's batch (0 when unknown) and its loss (NaN), as tensors."""
        size, loss = self._size, self._loss
        self._size = self._loss = None
        if size is None or not (isinstance(size, int) or graph.is_here(size)):
            size = 0
        if loss is None or not graph.is_here(loss):
            loss = float("nan")
        return tf.cast(size, tf.int64), tf.cast(tf.reduce_mean(loss), tf.float32)

    def _called(self, call: Any, *arguments: Any, **named: Any) -> Any:
        inputs = [v for v in tf.nest.flatten((arguments, named)) if isinstance(v, tf.Tensor)]
        if not inputs or not self._is_training(named) or not inputs[0].shape.rank:
            return call(*arguments, **named)
        self._note_size(inputs)
        graph.notice(lambda: self._session.clock.enter("forward"), [], after=inputs)
        arguments, named = graph.behind((arguments, named))
        outputs = call(*arguments, **named)
        after = [v for v in tf.nest.flatten(outputs) if isinstance(v, tf.Tensor)]
        graph.notice(lambda: self._session.clock.enter("backward"), [], after=after)
        return graph.behind(outputs)

    def _is_training(self, named: dict[str, Any]) -> bool:
        training = named.get("training")
        return bool(training) if self._has_training and training is not None else False

    def _lost(self, compute_loss: Any, *arguments: Any, **named: Any) -> Any:
        self._loss = loss = compute_loss(*arguments, **named)
        if self._size is None and named.get("training"):  # a `call` without that argument
            self._note_size([v for v in tf.nest.flatten(named.get("x")) if tf.is_tensor(v)])
        return loss

    def _note_size(self, inputs: Sequence[Any]) -> None:
        if inputs and inputs[0].shape.rank:
            self._size = inputs[0].shape[0] or tf.shape(inputs[0], out_type=tf.int64)[0]


def hook(instance: Any, name: str, around: Any) -> None:
    """Let `instance.name(...)` be `around(original, ...)`; its class stays as it is."""
    original = getattr(instance, name)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(original)
    def hooked(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(instance, name, hooked)
