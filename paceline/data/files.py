"""Where data files lie and how they are opened: the cache folder, compressed files, one writer."""

import bz2
import fcntl
import gzip
import lzma
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from paceline.errors import DeadlineError, MissingError

OPENERS = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile, ".bz2": bz2.BZ2File}


def cache_folder(*parts: str) -> Path:
    """The folder for downloads and parsed copies: $PACELINE_DATA or ~/.cache/paceline/data."""
    chosen = os.environ.get("PACELINE_DATA")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "paceline" / "data"
    return root.joinpath(*parts)


def find(folder: Path, *patterns: str) -> Path | None:
    """Return the first file of a pattern, plain or compressed, in `folder` or one level below."""
    for pattern in patterns:
        for suffix in ("", *OPENERS):
            for place in (pattern, f"*/{pattern}"):
                for path in sorted(folder.glob(place + suffix)):
                    if path.is_file():
                        return path
    return None


def require(folder: Path, *patterns: str, name: str) -> Path:
    """`find`, or say which files were looked for and where."""
    found = find(folder, *patterns)
    if found is None:
        wanted = " or ".join(patterns)
        problem = f"data set {name}: there is no {wanted} (plain, .gz, .xz or .bz2) in {folder}."
        raise MissingError(problem, "put it there, or name its folder with --data-dir.")
    return found


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed by the end of its name."""
    opener = OPENERS.get(path.suffix)
    if opener is None:
        return path.open("rb")
    opened: IO[bytes] = opener(path, "rb")
    return opened


def read(path: Path) -> bytes:
    """The whole decompressed content."""
    with open_binary(path) as file:
        return file.read()


@contextmanager
def exclusive(folder: Path, deadline_seconds: float = 3600) -> Iterator[None]:
    """Hold `folder` against other processes, so that only one of the workers downloads or parses.

    The lock is on the folder itself and ends with the process: nothing is left behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        give_up = time.monotonic() + deadline_seconds
        while not _try_lock(descriptor):
            if time.monotonic() > give_up:
                holder = f"the process that prepares {folder}"
                raise DeadlineError("waiting for data", deadline_seconds, [holder])
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
