"""CIFAR-10: 32x32 colour pictures, 10 classes; the binary and the python form of the release."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data import files
from paceline.data.base import Dataset, Pictures, Request
from paceline.data.fetch import RemoteFile, fetch
from paceline.errors import MissingError

ARCHIVE = RemoteFile(
    name="cifar-10-binary.tar.gz",
    urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
)
PYTHON_ARCHIVE = "cifar-10-python.tar.gz"

MEAN = (0.4914, 0.4822, 0.4465)
"""Per channel over the 50,000 training pictures; the deviation too."""
DEVIATION = (0.2470, 0.2435, 0.2616)

PICTURE_BYTES = 3 * 32 * 32
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def load(request: Request) -> Dataset:
    """Open the training or the test part, from loose files or from a release's archive."""
    names = TRAIN if request.train else TEST
    folder = request.data_dir or files.cache_folder("cifar10")
    parts = _loose(folder, names) or _archived(folder, names)
    if parts is None:
        if request.data_dir is not None:
            problem = f"data set cifar10: neither {names[0]}(.bin) nor an archive is in {folder}."
            fix = f"put {ARCHIVE.name} (or its content, or .xz of it) there."
            raise MissingError(problem, fix)
        fetch(ARCHIVE, folder)
        parts = _archived(folder, names)
        assert parts is not None  # fetched just now, and checked
    planes = np.concatenate([part[0] for part in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part[1] for part in parts])
    pictures = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return Pictures("cifar10", pictures, labels, num_classes=10, mean=MEAN, deviation=DEVIATION)


def _loose(folder: Path, names: tuple[str, ...]) -> list[Part] | None:
    paths = [files.find(folder, f"{name}.bin", name) for name in names]
    found = [path for path in paths if path is not None]
    if len(found) < len(names):
        return None
    return [_parse(path.name, files.read(path)) for path in found]


def _archived(folder: Path, names: tuple[str, ...]) -> list[Part] | None:
    path = files.find(folder, ARCHIVE.name, PYTHON_ARCHIVE)
    if path is None:
        return None
    with tarfile.open(path) as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        parts = []
        for name in names:
            member = members.get(f"{name}.bin") or members.get(name)
            content = archive.extractfile(member) if member else None
            if member is None or content is None:
                problem = f"data set cifar10: {path} holds no {name}."
                raise MissingError(problem, "fetch the release anew.")
            parts.append(_parse(Path(member.name).name, content.read()))
        return parts


def _parse(name: str, content: bytes) -> Part:
    return parse_binary(content) if ".bin" in name else parse_python(content)


def parse_binary(content: bytes) -> Part:
    """Records of one label byte and 3072 bytes: the red plane, the green one, the blue one."""
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PICTURE_BYTES)
    return records[:, 1:], records[:, 0].astype(np.int64)


def parse_python(content: bytes) -> Part:
    """A pickled dict with the pictures under `data` and the classes under `labels`."""
    fields = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    fields = {key.decode() if isinstance(key, bytes) else key: fields[key] for key in fields}
    return np.asarray(fields["data"], np.uint8), np.asarray(fields["labels"], np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and containers only: a pickle may otherwise run any code."""

    ALLOWED = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        for prefix in (
            "numpy.core.",
            "numpy._core.",
        ):  # numpy 1 and 2 name their inside differently
            if module.startswith(prefix) and (module.removeprefix(prefix), name) in self.ALLOWED:
                return super().find_class(f"numpy._core.{module.removeprefix(prefix)}", name)
        if (module, name) in self.ALLOWED and module in {"numpy", "_codecs"}:
            return super().find_class(module, name)
        problem = f"data set cifar10: the file asks for {module}.{name}, which no picture needs."
        raise MissingError(problem, "fetch the release anew; this file is not from it.")
