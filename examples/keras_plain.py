"""A plain Keras script on one worker. Beside it, keras_paceline.py: the same on many."""

import keras
from keras import layers

from paceline.data import shapes

x, y = shapes.draw(8192, seed=1)
x = x.astype("float32") / 255
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((32, 32, 3)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x, y, batch_size=32, epochs=1)
