"""Downloads from the official addresses: resumed where they broke off, checked, with progress.

Which files a data set consists of is stated in the data set's own module.
"""

import hashlib
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from paceline.data.files import exclusive
from paceline.errors import MissingError

BLOCK_BYTES = 1 << 20
ATTEMPTS = 4
"""Connections per address: each goes on where the one before broke off."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a data set, where it is published, and how to know it is whole."""

    name: str
    urls: tuple[str, ...]

    digest: str | None
    """ "sha256:…" or "md5:…"; None where none is published and the file was not at hand."""


class _BrokenError(Exception):
    """One address did not give the file; the message says why."""


def fetch(file: RemoteFile, folder: Path, *, timeout_seconds: float = 30) -> Path:
    """Return the file in `folder`, downloading it first when it is not there yet."""
    target = folder / file.name
    if target.exists():
        return target
    with exclusive(folder):
        if not target.exists():
            part = folder / f"{file.name}.part"
            _download(file, part, target, timeout_seconds)
            _verify(file, part)
            part.rename(target)
    return target


def fetch_all(files: Sequence[RemoteFile], folder: Path) -> Path:
    """`fetch` every file and return the folder."""
    for file in files:
        fetch(file, folder)
    return folder


def _download(file: RemoteFile, part: Path, target: Path, timeout_seconds: float) -> None:
    reasons = []
    for url in file.urls:
        for _ in range(ATTEMPTS):
            before = part.stat().st_size if part.exists() else 0
            try:
                return _transfer(url, part, timeout_seconds)
            except (OSError, HTTPException, _BrokenError) as error:
                reason = str(getattr(error, "reason", "") or error or type(error).__name__)
                if not part.exists() or part.stat().st_size <= before:
                    break  # no progress: the next address, if any
        reasons.append(reason)
    problem = f"{file.name} could not be downloaded ({reasons[-1]})."
    fix = f"fetch {file.urls[0]} elsewhere and put it at {target}, or give --data-dir."
    raise MissingError(problem, fix)


def _transfer(url: str, part: Path, timeout_seconds: float) -> None:
    """Append to `part` what is missing of the file at `url`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        with error:
            if have and error.code == 416:  # nothing lies beyond what we have: it is whole
                return
            raise
    with response:
        resumed = response.status == 206
        start = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        with part.open("ab" if resumed else "wb") as out, _bar() as progress:
            task = progress.add_task(part.stem, total=total, completed=start)
            while block := response.read(BLOCK_BYTES):
                out.write(block)
                progress.advance(task, len(block))
    size = part.stat().st_size
    if total is not None and size < total:
        raise _BrokenError(f"the connection ended after {size} of {total} bytes")


def _bar() -> Progress:
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _verify(file: RemoteFile, part: Path) -> None:
    if file.digest is None:
        return
    algorithm, _, expected = file.digest.partition(":")
    with part.open("rb") as content:
        found = hashlib.file_digest(content, algorithm).hexdigest()
    if found != expected:
        part.unlink()
        problem = f"{file.name} arrived damaged: its {algorithm} is {found}, not {expected}."
        raise MissingError(problem, "run again to download it anew; the damaged file is deleted.")
