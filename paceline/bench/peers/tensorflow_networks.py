"""Our models once more, in TensorFlow's own operations: same layers, same first weights.

Weights keep their torch names. Pictures have their channels last, as TensorFlow is fastest. Batch
norm keeps no running averages here: only training is timed.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from paceline.bench.peers.job import Array, PeerJob

Weights = Mapping[str, tf.Variable]
Forward = Callable[[Weights, tf.Tensor], tf.Tensor]


def network(job: PeerJob) -> Forward:
    """The function from weights and samples to logits; KeyError for a model that is not here."""
    return MODELS[job.model][0]


def convert(job: PeerJob, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Torch's layouts to TensorFlow's, for every weight."""
    flattened = MODELS[job.model][1](job.input_shape)
    converted: dict[str, Array] = {}
    for name, array in weights.items():
        if array.ndim == 4:
            array = array.transpose(2, 3, 1, 0)
        elif array.ndim == 2 and flattened is not None:
            # Torch flattened (channels, height, width), TensorFlow (height, width, channels).
            rows = len(array)
            array = array.reshape(rows, *flattened).transpose(2, 3, 1, 0).reshape(-1, rows)
            flattened = None
        elif array.ndim == 2:
            array = array.T
        converted[name] = np.ascontiguousarray(array)
    return converted


def mean_loss(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    return tf.reduce_mean(losses)


def _conv(w: Weights, name: str, x: tf.Tensor, *, stride: int = 1, padding: int = 0) -> tf.Tensor:
    """A convolution with torch's padding, and its bias where it has one."""
    kernel = w[f"{name}.weight"]
    same = stride == 1 and 2 * padding == kernel.shape[0] - 1
    if padding and not same:
        x = tf.pad(x, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
    x = tf.nn.conv2d(x, kernel, stride, "SAME" if same else "VALID")
    bias = w.get(f"{name}.bias")
    return x if bias is None else tf.nn.bias_add(x, bias)


def _full(w: Weights, name: str, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.bias_add(tf.matmul(x, w[f"{name}.weight"]), w[f"{name}.bias"])


def _norm(w: Weights, name: str, x: tf.Tensor) -> tf.Tensor:
    scale, shift = w[f"{name}.weight"], w[f"{name}.bias"]
    return tf.compat.v1.nn.fused_batch_norm(x, scale, shift, epsilon=1e-5)[0]


def _flatten(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [-1, int(np.prod(x.shape[1:]))])


def _adaptive_average(x: tf.Tensor, side: int) -> tf.Tensor:
    """Torch's AdaptiveAvgPool2d: averages over windows that may overlap, or repeat."""
    height, width = x.shape[1], x.shape[2]
    if (height, width) == (side, side):
        return x
    if (height, width) == (1, 1):
        return tf.tile(x, [1, side, side, 1])
    rows, columns = _windows(height, side), _windows(width, side)
    return tf.einsum("ph,nhwc,qw->npqc", rows, x, columns)


def _windows(size: int, side: int) -> Array:
    matrix = np.zeros((side, size), np.float32)
    for place in range(side):
        start, stop = place * size // side, -(-(place + 1) * size // side)
        matrix[place, start:stop] = 1 / (stop - start)
    return matrix


def _conv_pool(w: Weights, name: str, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(tf.nn.max_pool2d(_conv(w, name, x, padding=2), 2, 2, "VALID"))


def _classifier(w: Weights, names: tuple[str, ...], x: tf.Tensor) -> tf.Tensor:
    *hidden, last = names
    for name in hidden:
        x = tf.nn.relu(_full(w, name, x))
    return _full(w, last, x)


def _two_convolutions(*classifier: str) -> Forward:
    def forward(w: Weights, x: tf.Tensor) -> tf.Tensor:
        x = _conv_pool(w, "features.3", _conv_pool(w, "features.0", x))
        return _classifier(w, classifier, _flatten(x))

    return forward


def _dense(w: Weights, x: tf.Tensor) -> tf.Tensor:
    x, last = _flatten(x), len(w) - 2  # a weight and a bias each; sigmoids lie between
    for index in range(0, last, 2):
        x = tf.nn.sigmoid(_full(w, f"layers.{index}", x))
    return _full(w, f"layers.{last}", x)


def _alexnet(w: Weights, x: tf.Tensor) -> tf.Tensor:
    small = min(x.shape[1], x.shape[2]) < 63
    x = _conv(w, "features.0", x, stride=2 if small else 4, padding=5 if small else 2)
    x = tf.nn.relu(tf.nn.max_pool2d(x, 3, 2, "VALID"))
    x = tf.nn.relu(tf.nn.max_pool2d(_conv(w, "features.3", x, padding=2), 3, 2, "VALID"))
    x = tf.nn.relu(_conv(w, "features.6", x, padding=1))
    x = tf.nn.relu(_conv(w, "features.8", x, padding=1))
    x = tf.nn.relu(tf.nn.max_pool2d(_conv(w, "features.10", x, padding=1), 3, 2, "VALID"))
    names = ("classifier.1", "classifier.4", "classifier.6")
    return _classifier(w, names, _flatten(_adaptive_average(x, 6)))


def _vgg(*depths: int) -> Forward:
    def forward(w: Weights, x: tf.Tensor) -> tf.Tensor:
        place = 0
        for depth in depths:
            for position in range(depth):
                x = _conv(w, f"features.{place}", x, padding=1)
                last = position == depth - 1
                x = tf.nn.relu(tf.nn.max_pool2d(x, 2, 2, "VALID") if last else x)
                place += 3 if last else 2
        names = ("classifier.0", "classifier.3", "classifier.6")
        return _classifier(w, names, _flatten(_adaptive_average(x, 7)))

    return forward


def _bottleneck(w: Weights, name: str, x: tf.Tensor, stride: int) -> tf.Tensor:
    inside = tf.nn.relu(
        _norm(w, f"{name}.residual.1", _conv(w, f"{name}.residual.0", x)),
    )
    inside = _conv(w, f"{name}.residual.3", inside, stride=stride, padding=1)
    inside = tf.nn.relu(_norm(w, f"{name}.residual.4", inside))
    inside = _norm(w, f"{name}.residual.7", _conv(w, f"{name}.residual.6", inside))
    if f"{name}.shortcut.0.weight" in w:
        x = _norm(w, f"{name}.shortcut.1", _conv(w, f"{name}.shortcut.0", x, stride=stride))
    return tf.nn.relu(inside + x)


def _resnet(*depths: int) -> Forward:
    def forward(w: Weights, x: tf.Tensor) -> tf.Tensor:
        x = tf.nn.relu(_norm(w, "stem.1", _conv(w, "stem.0", x, stride=2, padding=3)))
        # What a ReLU gave is not negative, so zeros at the border change no maximum.
        x = tf.nn.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")
        block = 0
        for stage, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if stage and position == 0 else 1
                x, block = _bottleneck(w, f"stages.{block}", x, stride), block + 1
        return _full(w, "classifier", tf.reduce_mean(x, [1, 2]))

    return forward


Flattened = Callable[[tuple[int, ...]], tuple[int, ...] | None]


def _pooled_twice(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (64, shape[1] // 4, shape[2] // 4)


def _pictures_only(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape if len(shape) == 3 else None


_SMALL_CNN = (_two_convolutions("classifier.0", "classifier.2"), _pooled_twice)
_DENSE = (_dense, _pictures_only)
_VGG_FLAT: Flattened = lambda shape: (512, 7, 7)  # noqa: E731
_NOTHING: Flattened = lambda shape: None  # noqa: E731

MODELS: dict[str, tuple[Forward, Flattened]] = {
    "tutorial-cnn": (
        _two_convolutions("classifier.0", "classifier.2", "classifier.4"),
        _pooled_twice,
    ),
    "mnist-cnn": _SMALL_CNN,
    "cifar10-cnn": _SMALL_CNN,
    "adult-dnn": _DENSE,
    "acoustic-dnn": _DENSE,
    "mnist-dnn": _DENSE,
    "cifar10-dnn": _DENSE,
    "higgs-dnn": _DENSE,
    "alexnet": (_alexnet, lambda shape: (256, 6, 6)),
    "vgg16": (_vgg(2, 2, 3, 3, 3), _VGG_FLAT),
    "vgg19": (_vgg(2, 2, 4, 4, 4), _VGG_FLAT),
    "resnet50": (_resnet(3, 4, 6, 3), _NOTHING),
    "resnet152": (_resnet(3, 8, 36, 3), _NOTHING),
}
"""Name -> the network, and the shape of what its first full layer flattens."""
