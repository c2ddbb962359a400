"""Peer `tensorflow-single`: one plain TensorFlow process, the compute mark to beat."""

import tensorflow as tf

from paceline.bench.peers import job
from paceline.bench.peers import tensorflow_steps as steps


def main() -> None:
    with job.member(**steps.VERSIONS) as member:
        steps.use_threads(member.job)
        weights = steps.variables(member)
        optimizer = steps.optimizer(member.job)

        def one_step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            loss, gradients = steps.gradients(member.job, weights, inputs, targets)
            optimizer.apply_gradients(zip(gradients, weights.values(), strict=True))
            return loss

        member.train(tf.function(one_step, input_signature=steps.signature(member)))


if __name__ == "__main__":
    job.run(main)
