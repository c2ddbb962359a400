"""Gradients leave in bundles, the last layer's first, while TensorFlow computes the others.

A bundle is a node of the graph, so that the few calls to Python cost little beside what they carry.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from paceline.tensorflow import graph
from paceline.units import parse_bytes

BUNDLE = "4MiB"
"""A call from TensorFlow to Python costs 50 us: a bundle is worth it many times over."""


class Bundle(NamedTuple):
    """Gradients that leave together."""

    numbers: list[int]
    """Of their variables."""

    gradients: list[Any]


def leave_early(
    take: Callable[..., None],
    facts: Sequence[Any],
    numbers: Sequence[int],
    gradients: Sequence[Any],
) -> Bundle:
    """Have `take(numbers, *facts, *gradients)` called for each bundle as soon as it is computed.

    All but the last, which is returned: then the step waits for the other workers anyway.
    """
    *early, last = cut(numbers, gradients)
    rest = _Remainder(facts, [bundle.gradients for bundle in (*early, last)])
    for bundle in early:
        graph.notice(functools.partial(take, bundle.numbers), [*facts, *bundle.gradients])
        rest.waits()
    return last


def cut(numbers: Sequence[int], gradients: Sequence[Any]) -> list[Bundle]:
    """Cut gradients into bundles, the last layer's first, as backward makes them."""
    made = [Bundle([], [])]
    size_bytes, full_bytes = 0, parse_bytes(BUNDLE, "bundle")
    for number, gradient in reversed(list(zip(numbers, gradients, strict=True))):
        if size_bytes >= full_bytes:
            made.append(Bundle([], []))
            size_bytes = 0
        made[-1].numbers.append(number)
        made[-1].gradients.append(gradient)
        size_bytes += (gradient.shape.num_elements() or 0) * gradient.dtype.size
    return made


class _Remainder:
    """What is still to be computed when some of a graph's tensors are there already.

    With one thread for operations TensorFlow first runs one chain as far as it goes, here through
    the gradients of all activations, and leaves those of weights to the end. So what only later
    tensors need is told to wait for the node that takes the earlier ones. With more threads another
    one takes them up at once, and nothing need wait.
    """

    def __init__(self, facts: Sequence[Any], lots: Sequence[Sequence[Any]]) -> None:
        """`lots`: tensors in the order in which nodes of ours take them, each with all `facts`."""
        self._waiting: list[list[Any]] = []
        if tf.executing_eagerly() or len(lots) == 1 or not _has_one_thread():
            return
        nodes = [node] if (node := graph.last_node()) is not None else []
        lot_of = _reached([[*nodes, *_ops(facts)], *map(_ops, lots)])
        if any(lot > 1 and _acts(op) for op, lot in lot_of.items()):
            return  # TensorFlow orders such nodes by itself, and would be contradicted
        self._waiting = [[] for _ in lots[1:]]
        for op, lot in lot_of.items():
            if lot > 1 and any(1 <= lot_of[of.op] < lot for of in op.inputs):
                self._waiting[lot - 2].append(op)

    def waits(self) -> None:
        """The last node of ours has taken the next lot: what is needed after it may begin now."""
        if self._waiting:
            for op in self._waiting.pop(0):
                op._add_control_input(graph.last_node())


def _reached(lots: Sequence[Sequence[Any]]) -> dict[Any, int]:
    """Every operation that these need, with the number of the first lot that does."""
    reached: dict[Any, int] = {}
    for number, operations in enumerate(lots):
        pending = list(operations)
        while pending:
            op = pending.pop()
            if op not in reached:
                reached[op] = number
                pending += [*_ops(op.inputs), *op.control_inputs]
    return reached


def _ops(tensors: Sequence[Any]) -> list[Any]:
    return [tensor.op for tensor in tensors]


def _acts(op: Any) -> bool:
    """It does more than compute."""
    return bool(op.op_def.is_stateful) and op.type != "ReadVariableOp"


def _has_one_thread() -> bool:
    return int(tf.config.threading.get_inter_op_parallelism_threads()) == 1
