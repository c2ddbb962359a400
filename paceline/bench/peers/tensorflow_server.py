"""Peer `tensorflow-server`: ParameterServerStrategy with a ClusterCoordinator, asynchronous.

Workers and servers run TensorFlow's own server and wait; a coordinator hands each free worker the
next part of a batch. Steps are timed inside the worker that took them and written by the
coordinator, as the only one that sees them all.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import tensorflow as tf

from paceline.bench.peers import job
from paceline.bench.peers import tensorflow_steps as steps
from paceline.bench.peers.job import DONE, PeerMember
from paceline.record import Step

COORDINATOR = "chief"
WHO_AM_I = "member"
"""A file in each worker's own working directory: how a step learns which worker it runs in."""


def main() -> None:
    with job.member(coordinated=True, **steps.VERSIONS) as member:
        identity = member.identity
        # With one thread between operations the workers' server hangs; cores are held by affinity.
        steps.use_threads(member.job, between_operations=2)
        workers, servers = identity.workers, identity.servers - 1
        addresses = member.job.addresses
        cluster = {
            "worker": list(addresses[:workers]),
            "ps": list(addresses[workers : workers + servers]),
            COORDINATOR: list(addresses[workers + servers :]),
        }
        if identity.role == "worker":
            _serve(member, cluster, "worker", identity.rank)
        elif identity.rank < servers:
            _serve(member, cluster, "ps", identity.rank)
        else:
            _coordinate(member, cluster)
            # Only now: what the coordinator lets go of on its return is still on the workers.
            (member.folder / DONE).touch()


def _serve(member: PeerMember, cluster: dict[str, list[str]], kind: str, index: int) -> None:
    """Be TensorFlow's server until the coordinator says that all is done."""
    if kind == "worker":
        home = member.folder / member.identity.name
        home.mkdir()
        (home / WHO_AM_I).write_text(f"{index}\n", encoding="ascii")
        os.chdir(home)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=member.job.threads, inter_op_parallelism_threads=2
    )
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), kind, index, protocol="grpc", config=config
    )
    while not (member.folder / DONE).exists():
        time.sleep(0.05)
    del server


def _coordinate(member: PeerMember, cluster: dict[str, list[str]]) -> None:
    task = {"type": COORDINATOR, "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = steps.variables(member)
        optimizer = steps.optimizer(member.job)
    data = iter(coordinator.create_per_worker_dataset(lambda: _samples_on_worker(member)))

    def replica(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        loss, gradients = steps.gradients(member.job, weights, inputs, targets)
        optimizer.apply_gradients(zip(gradients, weights.values(), strict=True))
        return loss

    def one_step(data: Any, chosen: tf.Tensor) -> tuple[tf.Tensor, ...]:
        samples, targets, worker = next(data)
        inputs = tf.ensure_shape(tf.gather(samples, chosen), (None, *samples.shape[1:]))
        loss = strategy.run(replica, args=(inputs, tf.gather(targets, chosen)))
        with tf.control_dependencies([loss]):
            return loss, tf.timestamp(), worker

    traced = tf.function(one_step)
    workers = member.identity.workers
    parts = [
        tf.constant(member.indices(step, worker))
        for step in range(member.job.steps)
        for worker in range(workers)
    ]
    began = time.monotonic()
    answers = [coordinator.schedule(traced, args=(data, part)) for part in parts]
    coordinator.join()
    ended = [tuple(float(value) for value in answer.fetch()) for answer in answers]
    samples = [int(part.shape[0]) for part in parts]
    _write_steps(member, began, list(zip(ended, samples, strict=True)))


def _samples_on_worker(member: PeerMember) -> tf.data.Dataset:
    """The worker reads the arrays itself, once; every element is the whole set, not copied."""
    shape = member.samples.shape
    raw = tf.io.read_file(str(member.folder / "samples.raw"))
    samples = tf.reshape(tf.io.decode_raw(raw, tf.float32), shape)
    raw_targets = tf.io.read_file(str(member.folder / "targets.raw"))
    targets = tf.io.decode_raw(raw_targets, tf.int64)
    worker = tf.strings.to_number(tf.strings.strip(tf.io.read_file(WHO_AM_I)), tf.float64)
    return tf.data.Dataset.from_tensors((samples, targets, worker)).repeat()


Ended = tuple[tuple[float, ...], int]
"""What a step returned (loss, wall time of its end, worker), and its samples."""


def _write_steps(member: PeerMember, began: float, ended: list[Ended]) -> None:
    """One file per worker: a step lasts from the end of that worker's step before to its own."""
    to_monotonic = time.monotonic() - time.time()
    for worker in range(member.identity.workers):
        own = sorted((end, loss, count) for (loss, end, who), count in ended if who == worker)
        start, lines = began, []
        for number, (end, loss, count) in enumerate(own):
            stop = end + to_monotonic
            entry = Step(
                step=number,
                start_seconds=start,
                end_seconds=stop,
                breakdown_seconds={},
                samples=count,
                loss=loss,
            )
            lines.append(msgspec.json.encode(entry) + b"\n")
            start = stop
        run = Path(member.identity.run)
        (run / "members" / f"worker{worker}.steps.jsonl").write_bytes(b"".join(lines))


if __name__ == "__main__":
    job.run(main)
