"""What TensorFlow's three strategies share: threads, variables, the optimizer, one step."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from paceline.bench.peers import tensorflow_networks as networks
from paceline.bench.peers.job import PeerJob, PeerMember
from paceline.errors import SpecError

VERSIONS = {"tensorflow": tf.__version__}


def use_threads(job: PeerJob, *, between_operations: int = 1) -> None:
    """Hold this process to its share of the cores."""
    tf.config.threading.set_intra_op_parallelism_threads(job.threads)
    tf.config.threading.set_inter_op_parallelism_threads(between_operations)


def variables(member: PeerMember) -> dict[str, tf.Variable]:
    """The model's weights, by torch name, created in whatever scope this is called in."""
    job = member.job
    if job.model not in networks.MODELS:
        fix = f"one of: {', '.join(networks.MODELS)}."
        raise SpecError("peer", f'TensorFlow\'s side has no model "{job.model}".', fix)
    arrays = networks.convert(job, member.weights())
    return {name: tf.Variable(array, name=name) for name, array in arrays.items()}


def optimizer(job: PeerJob) -> tf.compat.v1.train.Optimizer:
    """Plain SGD, the papers' optimizer, which TensorFlow runs as one operation per variable."""
    options = job.optimizer
    if options.name != "sgd":
        problem = f'TensorFlow\'s side has no optimizer "{options.name}".'
        raise SpecError("peer", problem, "compare with sgd.")
    if options.momentum:
        return tf.compat.v1.train.MomentumOptimizer(
            options.learning_rate, options.momentum, use_nesterov=options.nesterov
        )
    return tf.compat.v1.train.GradientDescentOptimizer(options.learning_rate)


def gradients(
    job: PeerJob, weights: Mapping[str, tf.Variable], inputs: tf.Tensor, targets: tf.Tensor
) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
    """The loss and one gradient per weight."""
    trained = list(weights.values())
    with tf.GradientTape() as tape:
        loss = networks.mean_loss(networks.network(job)(weights, inputs), targets)
    found = tape.gradient(loss, trained)
    decay = job.optimizer.weight_decay
    if decay:
        found = [g + decay * w for g, w in zip(found, trained, strict=True)]
    return loss, found


def signature(member: PeerMember) -> list[tf.TensorSpec]:
    """Shapes known when the step is traced: TensorFlow plans better, and traces once."""
    start, stop = member.job.parts[member.identity.rank]
    shape = (stop - start, *member.samples.shape[1:])
    return [tf.TensorSpec(shape, tf.float32), tf.TensorSpec(shape[:1], tf.int64)]
