"""Keras' own public examples, with the four lines, run to their end on two workers."""

import gzip
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import spec
from paceline.testing import run_members

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def digits(folder: Path, train: int, test: int) -> Any:
    """In the shape of `keras.datasets.mnist.load_data()`: some of the real ones."""

    def read(name: str, skip: int, count: int, shape: tuple[int, ...]) -> Any:
        raw = gzip.decompress((folder / "mnist" / name).read_bytes())
        return np.frombuffer(raw, np.uint8, offset=skip).reshape(-1, *shape)[:count]

    return tuple(
        (
            read(f"{part}-images-idx3-ubyte.gz", 16, count, (28, 28)),
            read(f"{part}-labels-idx1-ubyte.gz", 8, count, ()),
        )
        for part, count in (("train", train), ("t10k", test))
    )


def reviews(count: int) -> Any:
    """In the shape of `keras.datasets.imdb.load_data()`: which words come tells the class."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> Any:
        labels = rng.integers(0, 2, count)
        texts = [rng.integers(1 + 500 * label, 1000 + 500 * label, 60).tolist() for label in labels]
        return np.array(texts, dtype=object), labels

    return draw(count), draw(count // 4)


def run_script(session: Any, path: str, data: str) -> dict[str, Any]:
    """Be the script; returns numbers it ends with."""
    import keras

    keras.datasets.imdb.load_data = lambda num_words: reviews(1536)
    if data:
        keras.datasets.mnist.load_data = lambda: digits(Path(data), 3072, 512)
    names = runpy.run_path(path, run_name="__main__")
    model = names["model"]
    found = {"weights": [np.abs(w).mean() for w in model.get_weights()], "steps": session.step}
    for name in ("score", "val_acc"):
        if name in names:
            found[name] = np.array(names[name])
    if "history" in names:
        found["history"] = names["history"].history
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["ring", "server:placement=colocated"])
def test_mnist_convnet(architecture, shared_data):
    results = run(SCRIPTS / "mnist_convnet.py", architecture, str(shared_data))
    assert results[0]["score"][1] > 0.75
    assert results[0]["steps"] == 3 * 11  # of 1382 samples each, in batches of 128


@pytest.mark.slow
def test_text_transformer():
    results = run(SCRIPTS / "text_transformer.py", "server:placement=colocated")
    losses = results[0]["history"]["val_loss"]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_training_loop(shared_data):
    results = run(SCRIPTS / "training_loop.py", "ring", str(shared_data))
    assert results[0]["val_acc"] > 0.7
    assert results[0]["steps"] == 2 * 40


def test_the_example():
    first, _ = run(EXAMPLES / "keras_paceline.py", "server:placement=colocated")
    assert first["steps"] == 128


def run(script: Path, architecture: str, data: str = "") -> list[dict[str, Any]]:
    options = spec.parse_architecture(architecture)
    results = run_members(
        run_script, str(script), data, workers=2, architecture=options, timeout_seconds=110
    )
    np.testing.assert_allclose(results[0]["weights"], results[1]["weights"], rtol=1e-5)
    return results
