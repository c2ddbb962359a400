"""HIGGS: 28 features of simulated collisions, signal or background; 11 M rows of CSV.

The text is parsed once, in several processes, into a file of float32 rows (label first) that is
mapped into memory from then on: neither the text nor the rows are ever in memory as a whole. The
official convention keeps the last 500,000 rows for test; a subset keeps its last tenth. Features
are shifted and scaled by the training part's mean and deviation.
"""

import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import files
from paceline.data.base import Batch, Dataset, Request
from paceline.data.fetch import RemoteFile, fetch
from paceline.data.sampling import Indices
from paceline.errors import MissingError

ARCHIVE = RemoteFile(
    name="HIGGS.csv.gz",
    urls=("https://archive.ics.uci.edu/ml/machine-learning-databases/00280/HIGGS.csv.gz",),
    digest="sha256:ea302c18164d4e3d916a1e2e83a9a8d07069fa6ebc7771e4c0540d54e593b698",
)
NUM_COLUMNS = 29
ROW_BYTES = 4 * NUM_COLUMNS
NUM_TEST = 500_000
TEST_FRACTION = 0.1
BLOCK_BYTES = 16 << 20
BLOCKS_WORTH_PROCESSES = 8
"""Below this much text, starting processes takes longer than parsing."""


class ParsedRows(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the parsed rows."""

    num_rows: int
    num_train: int
    mean: list[float]
    deviation: list[float]


class Higgs(Dataset):
    """Rows mapped from the parsed file; a batch reads its own rows and no others."""

    name, input_shape, num_classes = "higgs", (NUM_COLUMNS - 1,), 2

    def __init__(self, path: Path, summary: ParsedRows, *, train: bool) -> None:
        shape = (summary.num_rows, NUM_COLUMNS)
        rows = np.memmap(path, np.float32, mode="r", shape=shape)
        self._rows = rows[: summary.num_train] if train else rows[summary.num_train :]
        self._mean = np.array(summary.mean, np.float32)
        self._scale = 1 / np.array(summary.deviation, np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        rows = self._rows[indices]
        features = (rows[:, 1:] - self._mean) * self._scale
        return torch.from_numpy(features), torch.from_numpy(rows[:, 0].astype(np.int64))


def load(request: Request) -> Dataset:
    """Open the training or the test part, parsing the text first if that was never done."""
    if request.data_dir is not None:
        source = files.require(request.data_dir, "HIGGS.csv", "HIGGS*.csv", name="higgs")
    else:
        source = fetch(ARCHIVE, files.cache_folder("higgs"))
    path, summary = parsed(source)
    return Higgs(path, summary, train=request.train)


def parsed(source: Path, *, processes: int | None = None) -> tuple[Path, ParsedRows]:
    """Return the file of rows for `source` and its summary, made now or earlier.

    `processes` is for tests; left out, it is one per core for a large file.
    """
    state = source.stat()
    folder = files.cache_folder("higgs")
    target = folder / f"{source.name}-{state.st_size}-{state.st_mtime_ns}.float32"
    summary_path = target.with_suffix(".json")
    with files.exclusive(folder):
        if not summary_path.exists():
            part = target.with_suffix(".part")
            try:
                num_rows = _parse_file(source, part, processes)
                summary = _summarise(part, num_rows)
                part.rename(target)
                summary_path.write_bytes(msgspec.json.encode(summary))
            finally:
                part.unlink(missing_ok=True)
    return target, msgspec.json.decode(summary_path.read_bytes(), type=ParsedRows)


def _parse_file(source: Path, part: Path, processes: int | None) -> int:
    """Write the rows of `source` to `part` and return their number."""
    part.touch()
    num_rows = 0
    if processes is None:
        large = source.stat().st_size > BLOCKS_WORTH_PROCESSES * BLOCK_BYTES
        processes = len(os.sched_getaffinity(0)) if large else 1
    if processes == 1:
        for block in _blocks(source):
            num_rows += parse_block(block, part, num_rows, source)
        return num_rows
    waiting: deque[Future[int]] = deque()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for block in _blocks(source):
            if len(waiting) > 2 * processes:  # bounds the text in memory
                waiting.popleft().result()
            waiting.append(pool.submit(parse_block, block, part, num_rows, source))
            num_rows += block.count(b"\n")
        for future in waiting:
            future.result()
    return num_rows


def _blocks(source: Path) -> Iterator[bytes]:
    """Cut the decompressed text into blocks of whole lines, each line ended."""
    rest = b""
    with files.open_binary(source) as file:
        while block := file.read(BLOCK_BYTES):
            cut = block.rfind(b"\n") + 1
            if cut:
                yield rest + block[:cut]
                rest = block[cut:]
            else:
                rest += block
    if rest:
        yield rest + b"\n"


def parse_block(block: bytes, part: Path, first_row: int, source: Path) -> int:
    """Parse whole lines and write them at their place in `part`; return the number of rows."""
    try:
        rows = np.loadtxt(io.BytesIO(block), np.float32, delimiter=",", ndmin=2)
        rows = rows.reshape(block.count(b"\n"), NUM_COLUMNS)
    except ValueError as error:
        problem = (
            f"data set higgs: {source} is not rows of {NUM_COLUMNS} numbers after row {first_row}."
        )
        raise MissingError(problem, "fetch it anew.") from error
    with part.open("r+b") as file:
        file.seek(first_row * ROW_BYTES)
        rows.tofile(file)
    return len(rows)


def _summarise(part: Path, num_rows: int) -> ParsedRows:
    if num_rows < 2:
        raise MissingError("data set higgs: the file holds no rows.", "fetch it anew.")
    num_train = num_rows - max(1, min(NUM_TEST, int(TEST_FRACTION * num_rows)))
    rows = np.memmap(part, np.float32, mode="r", shape=(num_rows, NUM_COLUMNS))[:num_train, 1:]
    total = np.zeros(NUM_COLUMNS - 1)
    squares = np.zeros(NUM_COLUMNS - 1)
    for start in range(0, num_train, 1 << 16):
        block: NDArray[np.float64] = rows[start : start + (1 << 16)].astype(np.float64)
        total += block.sum(axis=0)
        squares += (block**2).sum(axis=0)
    mean = total / num_train
    deviation = np.sqrt(np.maximum(squares / num_train - mean**2, 0))
    deviation[deviation == 0] = 1
    return ParsedRows(
        num_rows=num_rows,
        num_train=num_train,
        mean=mean.tolist(),
        deviation=deviation.tolist(),
    )
