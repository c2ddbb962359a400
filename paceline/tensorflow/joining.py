"""`init` for TensorFlow: who this process is, its share of the cores, and one seed for all."""

import os
import secrets

import keras
import tensorflow as tf

from paceline.errors import SpecError
from paceline.session import start
from paceline.session.session import Session


def init() -> Session:
    """Find out who this process is and join the job; the first call of a script.

    On a server member this does not return: it serves until the workers are done, then exits.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        problem = f"Keras runs on {backend} here."
        fix = "write KERAS_BACKEND=tensorflow, or with torch use paceline.init and its distribute."
        raise SpecError("paceline.tensorflow", problem, fix)
    session = start.init()
    if session.participants.has_joined:
        problem = "this worker joins a job that runs, and TensorFlow's data are not divided anew."
        raise SpecError("paceline.tensorflow", problem, "start the job with all its workers.")
    _keep_to_cores()
    if session.workers > 1:
        # tf.data shuffles by it: workers must draw the same order to divide it. A script that
        # seeds all workers alike overrides it.
        number = session.values.agree("tensorflow/seed", str(secrets.randbelow(2**31)), kept=True)
        tf.random.set_seed(int(number))
    return session


def _keep_to_cores() -> None:
    """Use as many threads as the launcher gave this worker; a script may set its own before."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal() or tf.config.threading.get_intra_op_parallelism_threads():
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(int(threads))
        tf.config.threading.set_inter_op_parallelism_threads(int(threads))
    except RuntimeError as error:
        problem = "TensorFlow was used before init(), and its number of threads cannot change."
        fix = "call paceline.tensorflow.init() before the first operation or data set."
        raise SpecError("init", problem, fix) from error
