"""Photographs decoded by several processes at once.

Threads would share one interpreter lock, and beside sixteen of them the training thread itself
hardly gets a turn. Decoders are small processes without torch that write into shared memory; they
end when their standard input does, however this process ends.
"""

import json
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data import decoding
from paceline.errors import MissingError

SHARED_MEMORY = Path("/dev/shm")


def unreadable(what: str) -> MissingError:
    return MissingError(f"data set imagefolder: {what}.", "take that file out, or mend it.")


class Decoders:
    """Processes that share the work of each batch."""

    def __init__(
        self, paths: Sequence[Path], count: int, *, side: int, train: bool, seed: int, cache: bool
    ) -> None:
        self._options = {
            "paths": [str(path) for path in paths],
            "side": side,
            "train": train,
            "seed": seed,
            "cache": cache,
        }
        self._side, self._count, self._cache = side, count, cache
        self._capacity = 0
        self._processes: list[subprocess.Popen[str]] = []
        self._memory: mmap.mmap | None = None

    def pictures(self, numbers: Sequence[int], epoch: int) -> NDArray[np.uint8]:
        """Pictures in this order; what is returned is overwritten by the next call."""
        if len(numbers) > self._capacity:
            self._start(len(numbers))
        shares: list[list[tuple[int, int]]] = [[] for _ in self._processes]
        for place, number in enumerate(numbers):
            # Who has decoded a photograph before has it in its cache.
            shares[(number if self._cache else place) % len(shares)].append((place, number))
        for process, share in zip(self._processes, shares, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps((epoch, share)) + "\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            answer = process.stdout.readline().strip()
            if answer != "done":
                raise unreadable(answer or "a decoder has ended")
        assert self._memory is not None
        every: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        return every.reshape(-1, self._side, self._side, 3)[: len(numbers)]

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        for process in self._processes:
            process.wait()
        self._processes = []

    def _start(self, capacity: int) -> None:
        self.close()
        self._capacity = capacity
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryFile(dir=folder) as file:  # it has no name: nothing is left of it
            file.truncate(capacity * self._side * self._side * 3)
            self._memory = mmap.mmap(file.fileno(), 0)
            for _ in range(self._count):
                process = subprocess.Popen(
                    [sys.executable, "-P", str(Path(decoding.__file__))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(file.fileno(),),
                    text=True,
                )
                self._processes.append(process)
                assert process.stdin is not None
                options: dict[str, Any] = {**self._options, "descriptor": file.fileno()}
                process.stdin.write(json.dumps(options) + "\n")
                process.stdin.flush()
            for process in self._processes:  # an empty task: answered once the memory is mapped
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps((0, [])) + "\n")
                process.stdin.flush()
                process.stdout.readline()
