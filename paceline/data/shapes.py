"""`shapes`: drawn 32x32 pictures in 10 classes; learnable, and nothing to download.

Each picture is one figure in a random colour, place, size and slight turn, on a background of
another colour, with noise. The drawing is a formula per class over all pictures at once, so the
whole set takes a fraction of a second; it is the same on every machine and for every seed of a run.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.data.base import Dataset, Pictures, Request

SIDE = 32
NUM_TRAIN, NUM_TEST = 8192, 2048
BLOCK = 128
"""Pictures drawn at once."""

MEAN, DEVIATION = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
"""Declared, not measured: colours are drawn evenly around the middle."""

Plane = NDArray[np.float32]
Drawing = Callable[[Plane, Plane], NDArray[np.bool_]]


def _radius(x: Plane, y: Plane) -> Plane:
    return np.hypot(x, y)


def _cross(x: Plane, y: Plane) -> NDArray[np.bool_]:
    near, far = np.minimum(abs(x), abs(y)), np.maximum(abs(x), abs(y))
    return (near < 0.3) & (far < 1)


# x and y run over the figure's own frame: the figure fills about -1..1 of both.
DRAWINGS: dict[str, Drawing] = {
    "disc": lambda x, y: _radius(x, y) < 1,
    "ring": lambda x, y: abs(_radius(x, y) - 0.75) < 0.25,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    "frame": lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.72) < 0.2,
    "triangle": lambda x, y: (y < 0.8) & (2 * abs(x) - y < 0.9),
    "cross": _cross,
    "bar": lambda x, y: (abs(y) < 0.3) & (abs(x) < 1.1),
    "two bars": lambda x, y: (abs(abs(y) - 0.6) < 0.25) & (abs(x) < 1),
    "four dots": lambda x, y: np.hypot(abs(x) - 0.65, abs(y) - 0.65) < 0.35,
    "half disc": lambda x, y: (_radius(x, y) < 1) & (y < 0),
}


def draw(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return `count` pictures (height, width, channels) and their classes."""
    rng = np.random.default_rng(seed)
    blocks = [draw_block(min(BLOCK, count - start), rng) for start in range(0, count, BLOCK)]
    pictures, labels = zip(*blocks, strict=True)
    return np.concatenate(pictures), np.concatenate(labels)


def draw_block(count: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw as many pictures as stay in the processor's cache."""
    labels = rng.integers(len(DRAWINGS), size=count)
    centre = rng.uniform(-0.3, 0.3, (2, count, 1, 1)).astype(np.float32)
    size = rng.uniform(0.4, 0.7, (count, 1, 1)).astype(np.float32)
    turn = rng.uniform(-0.3, 0.3, (count, 1, 1)).astype(np.float32)
    background = rng.uniform(0.1, 0.9, (count, 1, 1, 3)).astype(np.float32)
    away = rng.uniform(0.3, 0.5, (count, 1, 1, 3)).astype(np.float32)
    colour = np.where(background < 0.5, background + away, background - away)

    axis = np.linspace(-1, 1, SIDE, dtype=np.float32)
    x, y = axis[None, None, :] - centre[0], axis[None, :, None] - centre[1]
    across = (x * np.cos(turn) + y * np.sin(turn)) / size
    down = (y * np.cos(turn) - x * np.sin(turn)) / size
    inside = np.empty((count, SIDE, SIDE, 1), bool)
    for label, drawing in enumerate(DRAWINGS.values()):
        chosen = labels == label
        inside[chosen, ..., 0] = drawing(across[chosen], down[chosen])
    noise = rng.standard_normal((count, SIDE, SIDE, 3), dtype=np.float32)
    values = np.where(inside, colour, background) + 0.08 * noise
    return (values.clip(0, 1) * 255).astype(np.uint8), labels


def load(request: Request) -> Dataset:
    """Draw the training or the test part."""
    pictures, labels = draw(NUM_TRAIN, seed=1) if request.train else draw(NUM_TEST, seed=2)
    return Pictures(
        "shapes", pictures, labels, num_classes=len(DRAWINGS), mean=MEAN, deviation=DEVIATION
    )
