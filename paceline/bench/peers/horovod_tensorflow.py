"""Peer `horovod-tensorflow`: Horovod's all-reduce under TensorFlow, over gloo, by `horovodrun`."""

import os

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

from paceline.bench.peers import job
from paceline.bench.peers import tensorflow_steps as steps
from paceline.bench.peers.horovodrun import become_rank
from paceline.launch import share_cores


def main() -> None:
    become_rank()
    with job.member(horovod=horovod.__version__, **steps.VERSIONS) as member:
        cores = share_cores(member.identity.workers)[member.identity.rank]
        if cores:
            os.sched_setaffinity(0, cores)
        steps.use_threads(member.job)
        hvd.init()
        weights = steps.variables(member)
        optimizer = steps.optimizer(member.job)
        hvd.broadcast_variables(list(weights.values()), root_rank=0)

        def one_step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            loss, gradients = steps.gradients(member.job, weights, inputs, targets)
            means = [hvd.allreduce(gradient) for gradient in gradients]
            optimizer.apply_gradients(zip(means, weights.values(), strict=True))
            return loss

        member.train(tf.function(one_step, input_signature=steps.signature(member)))
        hvd.shutdown()


if __name__ == "__main__":
    job.run(main)
