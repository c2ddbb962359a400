"""Peer `tensorflow-collective`: MultiWorkerMirroredStrategy, a ring all-reduce over gRPC."""

import json
import os

import tensorflow as tf

from paceline.bench.peers import job
from paceline.bench.peers import tensorflow_steps as steps


def main() -> None:
    with job.member(**steps.VERSIONS) as member:
        workers = list(member.job.addresses[: member.identity.workers])
        task = {"type": "worker", "index": member.identity.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        steps.use_threads(member.job)
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        with strategy.scope():
            weights = steps.variables(member)
            optimizer = steps.optimizer(member.job)

        def replica(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            loss, gradients = steps.gradients(member.job, weights, inputs, targets)
            # The optimizer sums over replicas, and every worker's gradient is a mean over its part.
            shared = [gradient / len(workers) for gradient in gradients]
            optimizer.apply_gradients(zip(shared, weights.values(), strict=True))
            return loss

        def one_step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            return strategy.run(replica, args=(inputs, targets))

        traced = tf.function(one_step, input_signature=steps.signature(member))
        member.train(lambda *batch: strategy.experimental_local_results(traced(*batch))[0])


if __name__ == "__main__":
    job.run(main)
