"""CollectiveLines of collectives as they come, in a member's own file."""

from collections.abc import Sequence

import msgspec

from paceline.errors import PacelineError
from paceline.record import CollectiveCall, RunFolder, cannot_write

MOST_BYTES = 256 << 20
"""A job of weeks does not fill a disk with its collectives; later ones are left out."""


class CollectiveLines:
    """Appends one member's collective calls."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._path = folder.path / "members" / f"{name}.collectives.jsonl"
        self._encoder = msgspec.json.Encoder()
        self._written = 0

    def add(self, entries: Sequence[CollectiveCall]) -> None:
        """Write them at once."""
        if not entries or self._written > MOST_BYTES:
            return
        content = b"".join(self._encoder.encode(entry) + b"\n" for entry in entries)
        self._written += len(content)
        try:
            with self._path.open("ab") as file:
                file.write(content)
        except OSError as error:
            problem: PacelineError = cannot_write(self._path, error)
            raise problem from error
