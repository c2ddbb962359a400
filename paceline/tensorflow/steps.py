"""One step of a distributed Keras optimizer: what is exchanged, and who updates.

`Averaged`   gradients are averaged and every worker applies them with its own Keras optimizer:
             exact for all of them, with clipping, schedules and scaling of the loss behind it
`ServedSteps`     servers update by Keras' formulas (`rules`) and the new weights come back
`LocalSteps`      every worker applies its own gradients; weights are averaged every so often
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import tensorflow as tf
import torch
from torch import Tensor

from paceline.architectures.base import Architecture
from paceline.autograd.gradients import Sink
from paceline.errors import ExchangeError, PacelineError, SpecError
from paceline.session.session import Session
from paceline.spec.workload import GradientUse
from paceline.tensorflow import bundles, graph, rules
from paceline.tensorflow.likeness import Likeness
from paceline.tensorflow.mirror import Array, Mirror, StandIn, handed_over, to_numpy, to_torch

SERVERS_WEIGHTS = (
    "{path} was assigned to before step {step}, outside the optimizer, and weights are the "
    "servers' here: what they send would overwrite it. Do it before "
    "paceline.tensorflow.distribute, or write server:mode=sync, where workers hold the weights."
)

Apply = Callable[[Sequence[Any], Sequence[Any]], Any]
"""The Keras optimizer's own `apply(gradients, variables)`."""


class Common:
    """What all ways share: the mirror, the record, and what went wrong inside a graph."""

    def __init__(
        self,
        session: Session,
        mirror: Mirror,
        optimizer: torch.optim.Optimizer,
        keras: Any,
        gradient_use: GradientUse | None = None,
    ) -> None:
        self.session, self.mirror, self.optimizer, self.keras = session, mirror, optimizer, keras
        session.distribute(mirror, optimizer, gradient_use=gradient_use)
        architecture = session.architecture
        assert architecture is not None
        self.architecture: Architecture = architecture
        mirror.write()
        self.likeness = Likeness(session, mirror.trained)
        self._numbers = {id(variable): n for n, variable in enumerate(mirror.trained)}
        self.nominal_size = 0.0
        """Samples of an equal part of a full batch; 0 where nobody divided batches."""

        self.failure: PacelineError | None = None
        """What a node raised: TensorFlow passes on its text alone."""

    def number(self, variable: Any) -> int:
        if id(variable) not in self._numbers:
            problem = f"{variable.path} is trained, and was not when the model was distributed."
            fix = "call paceline.tensorflow.distribute(model) again after unfreezing and compiling."
            raise SpecError("distribute", problem, fix)
        return self._numbers[id(variable)]

    def weight_of(self, size: int) -> float:
        """What this worker's gradient counts, an equal part of a full batch being 1."""
        return size / self.nominal_size if size and self.nominal_size else 1.0

    def end_step(self, size: Array, loss: Array, rate: Array) -> None:
        """Close the step in the record."""
        with self.noting_failures():
            if math.isfinite(float(loss)):
                self.session.report_loss(float(loss))
            passes: Any = getattr(type(self.mirror), "_paceline_passes", None)
            passes.samples += int(size)
            self.set_rate(rate)
            self.optimizer.step()

    def set_rate(self, rate: Array) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = float(rate)

    def begin_exchange(self) -> None:
        clock = self.session.clock
        clock.enter("backward")
        clock.ready()
        clock.enter("exchange_exposed")

    @contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Keep the error that passes through."""
        try:
            yield
        except PacelineError as error:
            self.failure = error
            self.session.distribution.remember(error)
            raise


class Way(Protocol):
    """How gradients become new weights."""

    common: Common

    def apply(self, original: Apply, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """In the place of the Keras optimizer's `apply`; called eagerly or while tracing."""

    def settle(self) -> None:
        """Every worker calls it after the same step: after it Keras holds one model."""


class Alone:
    """One worker: nothing is exchanged, and steps are recorded."""

    def __init__(self, session: Session, mirror: Mirror, keras: Any, passes: Any) -> None:
        self.common = Common(session, mirror, StandIn(mirror.tensors), keras)
        self._passes = passes

    def apply(self, original: Apply, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        facts = facts_of(self._passes, self.common.keras)
        clock = self.common.session.clock
        computed = [g for g in gradients if isinstance(g, tf.Tensor)]
        graph.notice(lambda: clock.enter("update"), [], after=computed)
        result, writes = graph.writes_of(lambda: original(graph.behind(gradients), variables))
        graph.notice(self.common.end_step, facts, after=writes)
        return result

    def settle(self) -> None:
        pass


class Averaged:
    """The mean gradient goes to the worker's own Keras optimizer."""

    def __init__(self, session: Session, mirror: Mirror, keras: Any, passes: Any) -> None:
        # Two numbers travel with the gradients: how much this worker's count, and whether its
        # script assigned to a variable.
        mirror.register_parameter("weight", torch.nn.Parameter(torch.zeros(2)))
        mirror.tensors = list(mirror.parameters())
        options = session.options
        if options.is_all_reduce and options.piece_option and options.piece_bytes is None:
            # A bucket that waits for more than a bundle would keep it from leaving.
            session.options = options.changed(**{options.piece_option: bundles.BUNDLE})
        self.common = Common(session, mirror, StandIn(mirror.tensors), keras)
        self._passes = passes

    def apply(self, original: Apply, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        numbers = [self.common.number(variable) for _, variable in pairs]
        facts, inputs = facts_of(self._passes, self.common.keras), [g for g, _ in pairs]

        def take(own: list[int], size: Array, *arrays: Array) -> None:
            with self.common.noting_failures():
                self._take(own, arrays, int(size))

        last = bundles.leave_early(take, facts[:1], numbers, inputs)

        def exchange(*given: Array) -> list[Array]:
            self.common.begin_exchange()
            take(last.numbers, *given)
            with self.common.noting_failures():
                return self._means(numbers)

        means = graph.call(exchange, [facts[0], *last.gradients], [g.dtype for g in inputs])
        for mean, gradient in zip(means, inputs, strict=True):
            mean.set_shape(gradient.shape)
        result, writes = graph.writes_of(lambda: original(means, [v for _, v in pairs]))
        graph.notice(self.common.end_step, facts, after=writes)
        return result

    @torch.no_grad()
    def _take(self, numbers: Sequence[int], arrays: Sequence[Array], size: int) -> None:
        tensors, weight = self.common.mirror.tensors, self.common.weight_of(size)
        for number, array in zip(numbers, arrays, strict=True):
            gradient = to_torch(array)
            tensors[number].grad = gradient if weight == 1.0 else gradient * weight
        sink = _sink(self.common.architecture)
        if tensors[-1].grad is None:
            has_assigned = bool(self.common.likeness.assigned)
            tensors[-1].grad = torch.tensor([weight, float(has_assigned)])
            sink.made(len(tensors) - 1)
        for number in numbers:
            sink.made(number)

    @torch.no_grad()
    def _means(self, numbers: Sequence[int]) -> list[Array]:
        tensors = self.common.mirror.tensors
        _sink(self.common.architecture).pass_over()
        total, have_assigned = _gradient(tensors[-1]).tolist()
        means = [_gradient(tensors[number]) for number in numbers]
        for tensor in tensors:
            tensor.grad = None  # TensorFlow's memory is its own again
        if total != 1.0:
            arrays = [to_numpy(mean / total) for mean in means]
        else:
            arrays = [handed_over(mean) for mean in means]
        self.common.likeness.look(at_all=bool(have_assigned))
        self.common.session.clock.enter("update")
        return arrays

    def settle(self) -> None:
        mirror = self.common.mirror
        if mirror.rest:
            mirror.read()
            self.common.architecture.settle()
            with self.common.likeness.ours():
                mirror.write()


class ServedSteps:
    """Gradients leave, servers update by Keras' formula, and new weights come back."""

    def __init__(self, session: Session, mirror: Mirror, keras: Any, passes: Any) -> None:
        rules.check(keras, mirror.trained, session.options)
        optimizer = rules.make(keras, mirror)
        self.common = Common(session, mirror, optimizer, keras, "nothing")
        self._passes = passes
        self._has_begun, self._weight = False, 1.0

    def apply(self, original: Apply, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        numbers = [self.common.number(variable) for _, variable in pairs]
        facts = facts_of(self._passes, self.common.keras)
        own = rules.clipped(self.common.keras, [gradient for gradient, _ in pairs])

        def take(own: list[int], *given: Array) -> None:
            with self.common.noting_failures():
                if not self._has_begun:
                    self._begin(numbers, given[: len(facts)])
                self._take(own, given[len(facts) :])

        last = bundles.leave_early(take, facts, numbers, own)

        def exchange(*given: Array) -> list[Array]:
            self.common.begin_exchange()
            take(last.numbers, *given)
            with self.common.noting_failures():
                return self._weights(given[: len(facts)])

        trained = self.common.mirror.trained
        types = [variable.value.dtype for variable in trained]
        made = graph.call(exchange, [*facts, *last.gradients], types)
        for variable, weights in zip(trained, made, strict=True):
            weights.set_shape(variable.shape)
            variable.assign(weights)
        return self.common.keras.iterations.assign_add(1)

    def _begin(self, numbers: list[int], facts: Sequence[Array]) -> None:
        """The first gradients of a step are about to leave; it will have those of `numbers`."""
        is_new = set(numbers)
        for number, tensor in enumerate(self.common.mirror.tensors):
            if number not in is_new:
                tensor.grad = None
        self.common.set_rate(facts[2])  # settings leave ahead of gradients
        self._has_begun, self._weight = True, self.common.weight_of(int(facts[0]))
        if path := self.common.likeness.assigned:
            raise ExchangeError(SERVERS_WEIGHTS.format(path=path, step=self.common.session.step))

    @torch.no_grad()
    def _take(self, numbers: list[int], arrays: Sequence[Array]) -> None:
        tensors, sink = self.common.mirror.tensors, _sink(self.common.architecture)
        for number, array in zip(numbers, arrays, strict=True):
            # Copied: a server may read it when TensorFlow has long put something else there.
            tensors[number].grad = to_torch(array).clone().mul_(self._weight)
            sink.made(number)

    @torch.no_grad()
    def _weights(self, facts: Sequence[Array]) -> list[Array]:
        self._has_begun = False
        _sink(self.common.architecture).pass_over()
        self.common.end_step(*facts)
        self.common.session.clock.enter("exchange_exposed")
        return [to_numpy(tensor.detach().clone()) for tensor in self.common.mirror.tensors]

    def settle(self) -> None:
        self.common.architecture.settle()
        with self.common.likeness.ours():
            self.common.mirror.write(rest=False)


class LocalSteps:
    """Every worker by itself, and all take the mean of the weights in turn."""

    def __init__(self, session: Session, mirror: Mirror, keras: Any, passes: Any) -> None:
        options: Any = session.options
        if options.state:
            problem = "state = true, and the optimizer's state is Keras' own."
            raise SpecError("architecture average", problem, "leave it out.")
        self.common = Common(session, mirror, StandIn(mirror.tensors), keras)
        self._passes, self._every, self._steps = passes, options.every, 0

    def apply(self, original: Apply, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        facts, clock = facts_of(self._passes, self.common.keras), self.common.session.clock
        gradients = self._weighted(facts[0], gradients)
        computed = [g for g in gradients if isinstance(g, tf.Tensor)]
        graph.notice(lambda: clock.enter("update"), [], after=computed)
        result, writes = graph.writes_of(lambda: original(graph.behind(gradients), variables))
        if self._every == 1:
            self._average(facts)
            return result
        (due,) = graph.call(lambda: [to_numpy(torch.tensor(self._is_due()))], [], [tf.bool], writes)
        due.set_shape(())
        tf.cond(due, lambda: self._average(facts), lambda: self._go_on(facts))
        return result

    def _weighted(self, size: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        """Count an uneven part of a full batch by its samples; of others nothing is known."""
        equal = self.common.nominal_size
        if equal.is_integer():
            return gradients
        share = tf.cast(size, tf.float32) / equal
        weight = tf.where(abs(share * equal - equal) < 1, share, 1.0)
        return [None if g is None else g * tf.cast(weight, g.dtype) for g in gradients]

    def _is_due(self) -> bool:
        return bool((self._steps + 1) % self._every == 0)

    def _go_on(self, facts: Sequence[Any]) -> Any:
        graph.notice(self._end, facts)
        return tf.constant(0)

    def _average(self, facts: Sequence[Any]) -> Any:
        mirror = self.common.mirror
        held = [*mirror.trained, *mirror.rest]
        values = [variable.value for variable in held]

        def exchange(*given: Array) -> list[Array]:
            with self.common.noting_failures(), torch.no_grad():
                arrays, tensors = given[len(facts) :], [*mirror.tensors, *mirror.buffers()]
                for tensor, array in zip(tensors, arrays, strict=True):
                    tensor.copy_(to_torch(array))
                self._end(*given[: len(facts)])
                return [to_numpy(tensor.detach().clone()) for tensor in tensors]

        types = [variable.value.dtype for variable in held]
        for variable, mean in zip(
            held, graph.call(exchange, [*facts, *values], types), strict=True
        ):
            mean.set_shape(variable.shape)
            variable.assign(mean)
        return tf.constant(0)

    def _end(self, *facts: Array) -> None:
        self._steps += 1
        self.common.end_step(*facts)

    def settle(self) -> None:
        mirror = self.common.mirror
        mirror.read()
        self.common.architecture.settle()
        mirror.write()


def facts_of(passes: Any, keras: Any) -> list[Any]:
    """Size of the batch, loss and learning rate, for the record."""
    size, loss = passes.take()
    return [size, loss, tf.cast(keras.learning_rate, tf.float32)]


def _sink(architecture: Architecture) -> Sink:
    """Who is told of gradients; in PyTorch autograd does."""
    sink: Any = architecture
    told: Sink = sink
    return told


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.detach().as_subclass(Tensor)
