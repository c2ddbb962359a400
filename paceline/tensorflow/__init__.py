"""Keras models on TensorFlow, trained over many workers by the same architectures as PyTorch's.

    import paceline.tensorflow as paceline

    paceline.init()                             # who am I
    model.compile(optimizer, loss)
    model = paceline.distribute(model)          # the architecture comes from outside
    data = paceline.shard(data)                 # this worker's part: tf.data, arrays, PyDataset

`model.fit` and loops with `GradientTape` train as before. Keras on its torch backend needs none of
this: `import paceline` knows it as any other PyTorch model.
"""

from importlib.util import find_spec

from paceline.errors import MissingError

if find_spec("tensorflow") is None:
    raise MissingError("TensorFlow is not installed.", 'pip install "paceline[tensorflow]".')

from paceline.session.calls import barrier, is_main, mean, rank, workers
from paceline.tensorflow.callbacks import LearningRateWarmUp
from paceline.tensorflow.distributing import distribute, report_loss, settle
from paceline.tensorflow.joining import init
from paceline.tensorflow.sharding import shard

__all__ = [
    "LearningRateWarmUp",
    "barrier",
    "distribute",
    "init",
    "is_main",
    "mean",
    "rank",
    "report_loss",
    "settle",
    "shard",
    "workers",
]
