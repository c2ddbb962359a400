"""Members of these tests fork from a server that has imported Keras, which takes seconds."""

import multiprocessing.forkserver
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from paceline import testing


@pytest.fixture(scope="package", autouse=True)
def keras_is_loaded() -> Iterator[None]:
    if find_spec("tensorflow") is None:
        pytest.skip('TensorFlow is not installed: pip install "paceline[tensorflow]"')
    server = multiprocessing.forkserver._forkserver
    server._stop()  # other tests may have started one, without Keras
    before = testing._PRELOAD
    testing._PRELOAD = [*before, "keras", "paceline.tensorflow"]
    yield
    server._stop()
    testing._PRELOAD = before
