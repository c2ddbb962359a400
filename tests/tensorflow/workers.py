"""What the members of these tests do; imports Keras, so tests name its functions and no more."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import paceline.tensorflow as paceline
from paceline.errors import ExchangeError
from paceline.session.session import Session
from paceline.tensorflow import bundles, steps

STEPS, BATCH = 20, 16
WORDS, LENGTH = 50, 6

Result = dict[str, Any]


def pictures() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 8, 8, 1)).astype("float32")
    return x, rng.integers(0, 4, STEPS * BATCH)


def sentences(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.integers(0, WORDS, (count, LENGTH)), rng.integers(0, 3, count).astype("int32")


def picture_model() -> Any:
    keras.utils.set_random_seed(0)
    inputs = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten()]
    return keras.Sequential([*inputs, layers.Dense(16, activation="tanh"), layers.Dense(4)])


def text_model() -> Any:
    keras.utils.set_random_seed(1)
    words = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 8)(words))
    return keras.Model(words, layers.Dense(3, name="out")(layers.Dense(8, "relu")(hidden)))


LOSS = {"from_logits": True}


def optimizer(name: str) -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.7)
    return {
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "nesterov": lambda: keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True),
        "clipped": lambda: keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=0.1),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5),
        "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
        "adagrad": lambda: keras.optimizers.Adagrad(0.05),
        "lion": lambda: keras.optimizers.Lion(0.01),
    }[name]()


def fit(session: Session, name: str) -> Result:
    """`model.fit` on arrays: the same global batches whatever the number of workers."""
    model = picture_model()
    loss = keras.losses.SparseCategoricalCrossentropy(**LOSS)
    several = 4 if name == "clipped" else 1
    model.compile(optimizer(name), loss, metrics=["accuracy"], steps_per_execution=several)
    if session.rank:  # worker 0's weights are what all start from
        model.set_weights([weights + 1 for weights in model.get_weights()])
    model = paceline.distribute(model)
    x, y = paceline.shard(*pictures())
    size = BATCH // session.workers
    history = model.fit(x, y, batch_size=size, shuffle=False, verbose=0).history
    return {**history, "weights": model.get_weights()}


def loop(session: Session, name: str) -> Result:
    """A loop with GradientTape over tf.data, whose last batch does not divide evenly."""
    model, chosen = text_model(), optimizer(name)
    loss_of = keras.losses.SparseCategoricalCrossentropy(**LOSS)
    model, chosen = paceline.distribute(model, chosen)
    data = tf.data.Dataset.from_tensor_slices(sentences(69)).shuffle(64).batch(BATCH)
    data = paceline.shard(data, batch="global")

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        chosen.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    tf.random.set_seed(3)  # of the order in which data are drawn
    losses = [float(step(x, y)) for _ in range(4) for x, y in data]
    return {"steps": len(losses), "weights": model.get_weights()}


def train(session: Session, cases: list[str]) -> dict[str, Result]:
    """Each case is "fit:optimizer" or "loop:optimizer"; gradients leave in several bundles."""
    _use_one_thread()
    bundles.BUNDLE = "256B"
    paceline.init()
    kinds = {"fit": fit, "loop": loop}
    return {case: kinds[case.split(":")[0]](session, case.split(":")[1]) for case in cases}


def train_without_one(session: Session, cases: list[str]) -> dict[str, Result]:
    """As `train`, but what worker 1 computes never reaches the others."""
    take = steps.Averaged._take

    def dropped(self: Any, numbers: Any, arrays: Any, size: int) -> None:
        lost = [np.zeros_like(array) for array in arrays] if session.rank == 1 else arrays
        take(self, numbers, lost, size)

    steps.Averaged._take = dropped
    return train(session, cases)


def learn(session: Session, name: str, epochs: int) -> list[float]:
    """Loss by epoch on something that can be learned."""
    paceline.init()
    x, _ = pictures()
    y = (x.mean((1, 2, 3)) > 0).astype("int32")
    model = keras.Sequential([layers.BatchNormalization(), picture_model()])  # built by `fit`
    model.compile(optimizer(name), keras.losses.SparseCategoricalCrossentropy(**LOSS))
    model = paceline.distribute(model)
    x, y = paceline.shard(x, y)
    losses: list[float] = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0).history["loss"]
    return losses


def refuse(session: Session, name: str) -> str:
    """What is said when this optimizer is distributed."""
    paceline.init()
    model = picture_model()
    try:
        paceline.distribute(model, optimizer(name))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rules(session: Session, names: list[str]) -> dict[str, float]:
    """How far a server's rule goes from the Keras optimizer it stands for, over ten steps."""
    from paceline.tensorflow import rules as known
    from paceline.tensorflow.mirror import Mirror, to_torch

    apart = {}
    for name in names:
        rng = np.random.default_rng(0)
        variables = [keras.Variable(rng.normal(size=s).astype("float32")) for s in ((5, 3), (7,))]
        chosen, mirror = optimizer(name), Mirror(variables, [])
        rule = known.make(chosen, mirror)
        for _ in range(10):
            gradients = [rng.normal(size=v.shape).astype("float32") for v in variables]
            own = known.clipped(chosen, [tf.constant(g) for g in gradients])
            for tensor, gradient in zip(mirror.tensors, own, strict=True):
                tensor.grad = to_torch(np.array(gradient))
            for group in rule.param_groups:
                group["lr"] = float(chosen.learning_rate)
            rule.step()
            chosen.apply([tf.constant(g) for g in gradients], variables)
        pairs = zip(mirror.tensors, variables, strict=True)
        apart[name] = max(float(np.abs(t.detach().numpy() - np.array(v)).max()) for t, v in pairs)
    return apart


def callbacks(session: Session, folder: str) -> Result:
    """What `fit` does once for all, and what users of Horovod know."""
    paceline.init()
    keras.utils.set_random_seed(session.rank)  # nothing but the order of samples may follow it
    model = picture_model()
    loss = keras.losses.SparseCategoricalCrossentropy(**LOSS)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    model = paceline.distribute(model)
    x, y = pictures()
    x, y = paceline.shard(x, y)
    path = Path(folder) / f"worker{session.rank}.keras"
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        validation_split=0.25,
        callbacks=[
            paceline.LearningRateWarmUp(epochs=2),
            keras.callbacks.ModelCheckpoint(path),
            keras.callbacks.EarlyStopping("val_loss", patience=5),
        ],
    ).history
    saved = sorted(file.name for file in Path(folder).iterdir())
    return {"history": history, "rate": float(model.optimizer.learning_rate), "saved": saved}


def half_precision(session: Session) -> Result:
    paceline.init()
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = picture_model()
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(**LOSS))
    model = paceline.distribute(model)
    x, y = paceline.shard(*pictures())
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    kind = type(model.optimizer).__name__
    return {"optimizer": kind, "weights": model.get_weights()}


def _use_one_thread() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def leave(session: Session) -> list[str]:
    """What happens in one backward pass through two layers, each of which fills a bundle."""
    _use_one_thread()
    bundles.BUNDLE = "64B"
    paceline.init()
    told: list[str] = []

    def computes(dy: Any) -> Any:
        told.append("goes on to the first layer")
        return dy

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def between(x: Any) -> Any:
        def backward(dy: Any) -> Any:
            passed = tf.numpy_function(computes, [dy], dy.dtype, stateful=False)
            return tf.ensure_shape(passed, dy.shape)

        return tf.identity(x), backward

    inputs = keras.Input((8,))
    outputs = layers.Dense(8)(layers.Lambda(between)(layers.Dense(8)(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model = paceline.distribute(model)
    take = steps.Averaged._take

    def taken(self: Any, numbers: Any, arrays: Any, size: int) -> None:
        told.append(f"taken {sorted(numbers)}")
        take(self, numbers, arrays, size)

    steps.Averaged._take = taken
    model.fit(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"), batch_size=4, verbose=0)
    return told


def change_alone(session: Session, how: str) -> str:
    """What is said when worker 1 (with "all", every worker) changes its model by itself."""
    _use_one_thread()
    paceline.init()
    model = picture_model()
    model.compile(optimizer("momentum"), keras.losses.SparseCategoricalCrossentropy(**LOSS))
    model = paceline.distribute(model)
    x, y = paceline.shard(*pictures())
    kernel = model.layers[-1].kernel

    def change(batch: int, logs: Any) -> None:
        if batch != 5 or (session.rank == 0 and how != "all"):
            return
        if how == "unseen":  # TensorFlow's variable, past Keras
            kernel.value.assign_add(tf.fill(kernel.shape, 0.01))
        elif how == "kernel":
            kernel.assign(kernel + 0.01)
        elif how == "rate":
            model.optimizer.learning_rate = 0.5
        else:
            model.set_weights([weights * 1.1 for weights in model.get_weights()])

    changes = keras.callbacks.LambdaCallback(on_train_batch_end=change)
    try:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[changes])
    except ExchangeError as error:
        session.distribution.error = None  # this script expects it
        return str(error)
    return ""
