"""Python functions as a part of a TensorFlow step, run alike eagerly and inside `tf.function`.

In a graph they are `tf.numpy_function` nodes: arrays go in without a copy, and out of them without
one where they are aligned; `tf.py_function` copies both ways, and leaving the graph after each step
costs a second call of TensorFlow (docs/experiments.md). Nodes of one graph run one after the other,
in the order in which the script made them, which is the same on every worker: with one thread for
operations, two that wait for other workers in another order would wait for ever.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from paceline.tensorflow.mirror import Array

_last: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Graph -> the last node of ours in it."""


def call(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[Any],
    types: Sequence[Any],
    after: Sequence[Any] = (),
) -> list[Any]:
    """Call `function` with arrays; returns tensors of `types`. `after`: what must be done before.

    What it returns must stay as it is until the next node of ours has run.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(out) for out in function(*map(np.asarray, inputs))]
    graph = tf.compat.v1.get_default_graph()
    before = [*after, _last[graph]] if graph in _last else list(after)
    with tf.control_dependencies(before):
        made = tf.numpy_function(function, list(inputs), list(types))
    tensors = [] if isinstance(made, tf.Operation) else list(made)
    _last[graph] = made if isinstance(made, tf.Operation) else made[0].op
    return tensors


def notice(function: Callable[..., None], inputs: Sequence[Any], after: Sequence[Any] = ()) -> None:
    """Call `function` for what it does, once `after` is done."""

    def quietly(*arrays: Array) -> list[Array]:
        function(*arrays)
        return []

    call(quietly, inputs, [], after)


def last_node() -> Any:
    """The last node of ours in the present graph, if there is one."""
    return _last.get(tf.compat.v1.get_default_graph())


def behind(value: Any) -> Any:
    """`value`, whose users wait for the last node of ours."""
    if tf.executing_eagerly():
        return value
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies([_last[graph]] if graph in _last else []):
        return tf.nest.map_structure(lambda v: tf.identity(v) if tf.is_tensor(v) else v, value)


def writes_of(act: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """What `act` returns, and the nodes it made that write to variables."""
    if tf.executing_eagerly():
        return act(), []
    graph = tf.compat.v1.get_default_graph()
    known = len(graph.get_operations())
    result = act()
    made = graph.get_operations()[known:]
    return result, [op for op in made if op.type.startswith(WRITING)]


WRITING = ("Assign", "ResourceApply", "ResourceScatter", "If", "StatelessIf", "PartitionedCall")
"""Beginnings of the types of nodes that may change a variable, by themselves or inside a branch."""


def is_here(tensor: Any) -> bool:
    """It can be used where the script is now: not the value of another graph."""
    if tf.executing_eagerly():
        return isinstance(tensor, tf.Tensor) and hasattr(tensor, "numpy")
    return getattr(tensor, "graph", None) is tf.compat.v1.get_default_graph()
