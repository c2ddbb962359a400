"""Peers `keras-…`: the same network as a Keras model on TensorFlow, trained by Paceline.

No stranger but our own exchange under another framework, started as the strangers are, so that its
rows stand beside theirs: the same TensorFlow, the same operations, another way to agree.
"""

import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import paceline.tensorflow as paceline
from paceline.bench.peers import job
from paceline.bench.peers import tensorflow_networks as networks
from paceline.bench.peers.job import PeerMember
from paceline.bench.peers.tensorflow_steps import signature
from paceline.errors import SpecError
from paceline.tensorflow import sharding


class KerasNetwork(keras.Model):  # type: ignore[misc]
    """One of our models, in TensorFlow's operations."""

    def __init__(self, member: PeerMember) -> None:
        super().__init__()
        self._forward = networks.network(member.job)
        self._weights_by_name = {}
        for name, array in networks.convert(member.job, member.weights()).items():
            variable = self.add_weight(shape=array.shape, name=name.replace(".", "_"))
            variable.assign(array)
            self._weights_by_name[name] = variable
        self.built = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        return self._forward({n: v.value for n, v in self._weights_by_name.items()}, inputs)


def main() -> None:
    session = paceline.init()
    assert session.recorder is not None, "the runner names a run folder"
    member = PeerMember(Path(os.environ[job.VARIABLE]), session.identity, session.recorder)
    session.recorder.member.versions["tensorflow"] = tf.__version__
    session.recorder.member.results["num_samples"] = member.job.num_samples
    model, optimizer = paceline.distribute(KerasNetwork(member), _sgd(member))
    sharding.note_batch(session, member.job.parts[-1][1])
    decay = member.job.optimizer.weight_decay

    @tf.function(input_signature=signature(member))  # type: ignore[untyped-decorator]
    def one_step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = networks.mean_loss(model(inputs, training=True), targets)
        trained = model.trainable_variables
        gradients = tape.gradient(loss, trained)
        if decay:
            gradients = [g + decay * v for g, v in zip(gradients, trained, strict=True)]
        paceline.report_loss(loss)
        optimizer.apply(gradients, trained)

    for step in range(member.job.steps):
        session.clock.enter("input")
        one_step(*member.batch(step))
    session.close()


def _sgd(member: PeerMember) -> Any:
    options = member.job.optimizer
    if options.name != "sgd":
        problem = f'this peer has no optimizer "{options.name}".'
        raise SpecError("peer", problem, "compare with sgd.")
    momentum, nesterov = options.momentum, options.nesterov
    return keras.optimizers.SGD(options.learning_rate, momentum=momentum, nesterov=nesterov)


if __name__ == "__main__":
    job.run(main)
