"""The LIBSVM text format: `label index:value index:value …`, indices from 1, zeros left out."""

import numpy as np
from numpy.typing import NDArray


def parse(text: bytes, num_features: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return dense rows and labels as written. The text does not tell `num_features`."""
    lines = text.split(b"\n")
    counts = np.array([line.count(b":") for line in lines if line.strip()])
    numbers = np.array(text.replace(b":", b" ").split(), dtype=np.float64)
    starts = np.cumsum(1 + 2 * counts) - (1 + 2 * counts)
    labels = numbers[starts].astype(np.int64)
    pairs = np.delete(numbers, starts).reshape(-1, 2)
    rows = np.zeros((len(counts), num_features), np.float32)
    rows[np.repeat(np.arange(len(counts)), counts), pairs[:, 0].astype(np.int64) - 1] = pairs[:, 1]
    return rows, labels
