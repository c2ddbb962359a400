"""`distribute`: a Keras model and its optimizer stay the script's own, and train over all workers.

The optimizer's `apply` is hooked on the object itself, outside everything that Keras does inside it
(clipping, decay, scaling of the loss), so its internals may change; no optimizer is subclassed.
"""

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

from paceline import spec
from paceline.errors import PacelineError, SpecError
from paceline.record.entries import TRACED
from paceline.session.session import Session
from paceline.session.start import current
from paceline.telemetry import EVALUATION
from paceline.tensorflow import graph, sharding
from paceline.tensorflow.callbacks import Agreement, for_this_worker
from paceline.tensorflow.mirror import Mirror
from paceline.tensorflow.passes import KerasPasses, hook
from paceline.tensorflow.steps import Alone, Averaged, Common, LocalSteps, ServedSteps, Way

_distributed: list["Distributed"] = []

ROWS = (
    "TensorFlow: an embedding's gradient is exchanged whole, rows that occur several times summed. "
    "Keras alone gives each occurrence to the optimizer by itself, so its Adam takes other steps."
)
MANY_TRACES = 10
TRACED_ANEW = (
    "TensorFlow traced the step {count} times within {steps} steps: a tf.function is compiled anew "
    "for each Python number, and each new shape, that it is called with"
)
BUILD = "call model.build(input_shape), or run one batch through it, before distribute."


def distribute(model: Any, optimizer: Any = None) -> Any:
    """Return the model (and the optimizer, if given), trained over all workers from here on.

    They are the same objects as before; all workers start from worker 0's numbers. A compiled model
    brings its optimizer along. Call it again when the script compiles with another optimizer or
    unfreezes layers.
    """
    session = current()
    if not isinstance(model, keras.Model):
        problem = f"it was given a {type(model).__name__}, and distributes a keras.Model."
        fix = "build a keras.Model; PyTorch models go to paceline.distribute."
        raise SpecError("distribute", problem, fix)
    chosen = optimizer or getattr(model, "optimizer", None)
    if not isinstance(chosen, keras.optimizers.Optimizer):
        problem = "the model has no optimizer yet."
        fix = "call model.compile(...) before, or distribute(model, optimizer)."
        raise SpecError("distribute", problem, fix)
    known = next((one for one in _distributed if one.model is model), None)
    if known is None:
        known = Distributed(session, model)
        if not _distributed:
            _show_own_failures()
        _distributed.append(known)
    known.follow(chosen)
    return model if optimizer is None else (model, optimizer)


def settle() -> None:
    """Bring the weights to rest: after it every worker holds the same model, whole.

    Every worker calls it at the same point. With `average` it averages at once; statistics of batch
    norm become worker 0's. In asynchronous modes each worker has its newest weights.
    """
    for one in _distributed:
        one.settle()


def report_loss(loss: Any) -> None:
    """Put this worker's loss of the current step into the record; call it before `apply`.

    Works inside `tf.function`. `fit` does it by itself.
    """
    session = current()
    graph.notice(lambda value: session.report_loss(float(value)), [tf.cast(loss, tf.float32)])


class Distributed:
    """One Keras model, and what stands between it and the exchange."""

    def __init__(self, session: Session, model: Any) -> None:
        self.session, self.model = session, model
        self._passes = KerasPasses(session, model)
        self._optimizer: Any = None
        self._hooked: list[Any] = []
        self._way: Way | None = None
        self._has_rows = False
        self._traces = 0
        hook(model, "fit", self._fit)
        for name in ("evaluate", "predict"):
            hook(model, name, self._evaluate)

    @property
    def _common(self) -> Common:
        assert self._way is not None
        return self._way.common

    @property
    def failure(self) -> PacelineError | None:
        """What went wrong inside a graph."""
        return None if self._way is None else self._common.failure

    def follow(self, optimizer: Any) -> None:
        """Exchange what this optimizer applies."""
        self._optimizer, self._way = optimizer, None
        if not any(known is optimizer for known in self._hooked):
            self._hooked.append(optimizer)
            hook(optimizer, "apply", self._apply)
        if self.is_built:
            self.connect()

    @property
    def is_built(self) -> bool:
        """Every layer has its variables, inner ones too where Keras tells of them."""
        return bool(self.model.built) and all(layer.built for layer in self._layers)

    @property
    def _layers(self) -> list[Any]:
        return list(getattr(self.model, "_flatten_layers", lambda: self.model.layers)())

    def connect(self) -> None:
        """Meet the other workers with what is trained now; once for each optimizer."""
        if self._way is not None:
            return
        model, session = self.model, self.session
        trained = list(model.trainable_variables)
        if not trained:
            fix = "pass a model with weights that are not frozen."
            raise SpecError("distribute", "the model has nothing to train.", fix)
        rest = [v for v in model.non_trainable_variables if "float" in v.dtype]
        with tf.init_scope():
            mirror = Mirror(trained, rest)
            self._way = _way(session)(session, mirror, self._optimizer, self._passes)
        self._common.nominal_size = sharding.nominal_size(session)

    def settle(self) -> None:
        if self._way is not None:
            self._way.settle()

    # What the script calls.

    def _apply(self, original: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is None:
            trainable_variables = self.model.trainable_variables
        gradients, variables = self._dense(list(grads)), list(trainable_variables)
        if not gradients:
            return original(gradients, variables)
        if self._way is None:
            problem = "the model had no weights yet when it was distributed."
            raise SpecError("distribute", problem, BUILD)
        self._common.nominal_size = sharding.nominal_size(self.session)
        self._count_trace()
        if not self.session.steps.observers.reach.counts:
            self._tell_reach(gradients, variables)
        with self._common.likeness.ours():
            return self._way.apply(original, gradients, variables)

    def _count_trace(self) -> None:
        """A graph is made once for each shape; one that is made in most steps is a mistake."""
        if tf.executing_eagerly():
            return
        self._traces += 1
        if self._traces == MANY_TRACES and self.session.step < 2 * MANY_TRACES:
            self.session.note(
                TRACED_ANEW.format(count=self._traces, steps=self.session.step), TRACED
            )

    def _tell_reach(self, gradients: list[Any], variables: list[Any]) -> None:
        """For the record: weights that are frozen, and that the loss does not depend on."""
        made = [v for layer in self._layers for v in getattr(layer, "_trainable_variables", ())]
        weights = {variable.path: math.prod(variable.shape) for variable in made}
        pairs = zip(gradients, variables, strict=True)
        lacking = {v.path: weights.get(v.path, 0) for g, v in pairs if g is None}
        frozen = {v.path: weights[v.path] for v in made if not v.trainable}
        self.session.steps.observers.reach.tell(weights, frozen, lacking)

    def _dense(self, gradients: Any) -> list[Any]:
        """Embeddings give the rows they touched; what is averaged is the whole."""
        if not self._has_rows and any(isinstance(g, tf.IndexedSlices) for g in gradients):
            self._has_rows = True
            self.session.note(ROWS)
        return [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    def _fit(self, original: Any, *arguments: Any, **named: Any) -> Any:
        given = inspect.signature(original).bind(*arguments, **named)
        self._prepare()
        if not self.is_built:
            self.model(_nothing_like(given.arguments.get("x")))
        self.connect()
        extra = given.arguments.get("callbacks")
        given.arguments["callbacks"] = for_this_worker(Agreement(self), extra, self.session)
        if not self.session.participants.is_speaker:
            given.arguments["verbose"] = 0
        try:
            return original(*given.args, **given.kwargs)
        except tf.errors.OpError:
            if self.failure is None:
                raise
            raise self.failure from None

    def _evaluate(self, original: Any, *arguments: Any, **named: Any) -> Any:
        """What the script evaluates, between steps too, is no part of a step."""
        with self.session.clock.within(EVALUATION):
            return original(*arguments, **named)

    def _prepare(self) -> None:
        """`compile` may have come after `distribute`."""
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        if optimizer is not self._optimizer and optimizer is not None:
            if getattr(optimizer, "inner_optimizer", None) is not self._optimizer:
                problem = "the model was compiled with an optimizer that distribute does not know."
                fix = "call paceline.tensorflow.distribute(model) after model.compile(...)."
                raise SpecError("fit", problem, fix)
            self._unhook()  # mixed precision: what scales the loss stands outside
            self.follow(optimizer)
        if model.jit_compile:
            model.jit_compile = False
            model.train_function = model.test_function = model.predict_function = None
            self.session.note("TensorFlow: jit_compile is off, XLA compiles no exchange.")

    def _unhook(self) -> None:
        for optimizer in self._hooked:
            optimizer.__dict__.pop("apply", None)
        self._hooked.clear()

    # What all workers agree on.

    def metrics(self) -> dict[str, float]:
        """The model's metrics over the samples of all workers; each keeps its own as well.

        Metrics are computed from sums (of losses, of counts): these are added up.
        """
        variables = [v for metric in self.model.metrics for v in metric.variables]
        if self.session.workers == 1 or not variables:
            return _plain(self.model.get_metrics_result())
        own = [np.array(variable) for variable in variables]
        flat = torch.from_numpy(np.concatenate([a.astype(np.float64).ravel() for a in own]))
        means, count, start = self.session.group.mean(flat).numpy(), self.session.workers, 0
        for variable, values in zip(variables, own, strict=True):
            times = count if variable.aggregation == "sum" else 1
            part = means[start : start + values.size].reshape(values.shape) * times
            variable.assign(part.astype(values.dtype))
            start += values.size
        results = _plain(self.model.get_metrics_result())
        for variable, values in zip(variables, own, strict=True):
            variable.assign(values)
        return results

    def mean_logs(self, names: list[str], logs: dict[str, Any]) -> dict[str, float]:
        """The mean over workers of what a `train_step` of the script's own returns."""
        values = torch.tensor([float(np.mean(logs[name])) for name in names], dtype=torch.float64)
        return dict(zip(names, self.session.group.mean(values).tolist(), strict=True))

    def check_weights(self) -> None:
        """Synchronous workers must hold the same weights."""
        if isinstance(self._way, Averaged):
            self._common.likeness.look(at_all=True)


def _nothing_like(x: Any) -> Any:
    """One sample of zeros in the shape of what `fit` is given: it makes Keras build a model."""
    if isinstance(x, tf.data.Dataset):
        x = x.element_spec
    elif isinstance(x, keras.utils.PyDataset):
        x = x[0]
    x = x[0] if isinstance(x, tuple) else x
    if not all(hasattr(part, "shape") and hasattr(part, "dtype") for part in tf.nest.flatten(x)):
        raise SpecError("fit", "the model has no weights yet.", BUILD)
    return tf.nest.map_structure(
        lambda part: tf.zeros([1, *(size or 1 for size in part.shape[1:])], part.dtype), x
    )


def _show_own_failures() -> None:
    """An error that ends the script is told in our words, not in TensorFlow's about a node."""
    show = sys.excepthook

    def show_own(kind: Any, error: Any, traceback: Any) -> None:
        own = next((one.failure for one in _distributed if one.failure is not None), None)
        if own is not None and isinstance(error, tf.errors.OpError):
            kind, error, traceback = type(own), own, own.__traceback__
        show(kind, error, traceback)

    sys.excepthook = show_own


def _way(session: Session) -> Callable[[Session, Mirror, Any, KerasPasses], Way]:
    """How an architecture serves TensorFlow."""
    options = session.options
    if session.workers == 1:
        return Alone
    if not options.takes_tensorflow:
        name = spec.architecture_name(options)
        problem = f'"{name}" trains PyTorch models only, and Keras on TensorFlow has none.'
        raise SpecError("architecture", problem, "use ring, server, average or hybrid.")
    if options.averaging is not None:
        return LocalSteps
    served = options.serves_workers
    if served is not None and served.gradients_leave(None) != "for means":
        return ServedSteps
    return Averaged


def _plain(results: Any) -> dict[str, float]:
    flat = keras.tree.flatten_with_path(results)
    return {"/".join(map(str, path)): float(np.mean(value)) for path, value in flat}
