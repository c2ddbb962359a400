"""MNIST: 28x28 grey digits in IDX files, plain or compressed."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data import files
from paceline.data.base import Dataset, Pictures, Request
from paceline.data.fetch import RemoteFile, fetch_all
from paceline.errors import MissingError

MEAN, DEVIATION = (0.1307,), (0.3081,)
"""Over the 60,000 training pictures."""

BYTES_MAGIC = b"\x00\x00\x08"
"""IDX files start with two zeros, the element type (8 is a byte) and the number of dimensions."""


def _remote(name: str, digest: str) -> RemoteFile:
    places = ("http://yann.lecun.com/exdb/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist")
    return RemoteFile(
        name=f"{name}.gz", urls=tuple(f"{place}/{name}.gz" for place in places), digest=digest
    )


FILES = (
    _remote("train-images-idx3-ubyte", "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    _remote("train-labels-idx1-ubyte", "md5:d53e105ee54ea40749a09fcbcd1e9432"),
    _remote("t10k-images-idx3-ubyte", "md5:9fb629c4189551a2d022fa330f9573f3"),
    _remote("t10k-labels-idx1-ubyte", "md5:ec29112dd5afa0611ce80d1b7f02629c"),
)


def load(request: Request) -> Dataset:
    """Open the training or the test part."""
    folder = request.data_dir or fetch_all(FILES, files.cache_folder("mnist"))
    part = "train" if request.train else "t10k"
    pictures = _read(folder, f"{part}-images-idx3-ubyte")[..., np.newaxis]
    labels = _read(folder, f"{part}-labels-idx1-ubyte").astype(np.int64)
    return Pictures("mnist", pictures, labels, num_classes=10, mean=MEAN, deviation=DEVIATION)


def _read(folder: Path, name: str) -> NDArray[np.uint8]:
    path = files.require(folder, name, name.replace("-idx", ".idx"), name="mnist")
    try:
        return parse_idx(files.read(path))
    except ValueError as error:
        problem = f"data set mnist: {path} is not an IDX file of bytes ({error})."
        raise MissingError(problem, "fetch it anew.") from error


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """Return the array of an IDX file of bytes."""
    if content[:3] != BYTES_MAGIC:
        raise ValueError(f"it starts with {content[:4]!r}")
    num_dimensions = content[3]
    shape = np.frombuffer(content, ">u4", num_dimensions, offset=4).tolist()
    offset = 4 + 4 * num_dimensions
    if len(content) != offset + math.prod(shape):
        raise ValueError(f"{len(content) - offset} bytes for an array of {shape}")
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape).copy()
