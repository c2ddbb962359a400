"""Notes that members leave each other before step 1, and while they set up again."""

import secrets
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore

from paceline.collectives.context import Context
from paceline.errors import DeadlineError, ExchangeError
from paceline.wire import JobKey

T = TypeVar("T")
COLLECTING_SECONDS = 0.005


class Meeting:
    """This member's access to the store; without one (a single member) notes stay here."""

    def __init__(self, context: Context) -> None:
        self._name, self._seconds = context.identity.name, context.deadline_seconds
        attempt = context.identity.attempt
        self._store = PrefixStore(f"server/{attempt}", context.store) if context.store else None
        self._notes: dict[str, bytes] = {}

    def leave(self, key: str, note: Any) -> None:
        data = msgspec.msgpack.encode(note)
        if self._store is None:
            self._notes[key] = data
        else:
            # The store takes text: bytes travel as Latin-1 inside torch, so hex keeps them whole.
            self._store.set(key, data.hex())

    def has(self, key: str) -> bool:
        if self._store is None:
            return key in self._notes
        try:
            return bool(self._store.check([key]))
        except torch.distributed.DistNetworkError as error:
            raise self._store_is_gone(key) from error

    def read(self, key: str, kind: type[T], author: str) -> T:
        """Return a note, waiting for its author until the deadline."""
        if self._store is None:
            return msgspec.msgpack.decode(self._notes[key], type=kind)
        began = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=self._seconds))
        except (torch.distributed.DistError, RuntimeError) as error:
            if time.monotonic() - began < self._seconds / 2:  # the store is gone, and its keeper
                raise self._store_is_gone(key) from error
            operation = f"{self._name} reads the note {key}"
            raise DeadlineError(operation, self._seconds, [author]) from error
        return msgspec.msgpack.decode(bytes.fromhex(self._store.get(key).decode()), type=kind)

    def _store_is_gone(self, key: str) -> ExchangeError:
        told = f"{self._name} lost the job's store before it could read the note {key}"
        return ExchangeError(f"{told}: worker0 has ended.")

    def gather(self, key: str, note: str, workers: int) -> list[str]:
        """Every worker's note; called by all of them, it returns when all have."""
        self.leave(f"{key}/{self._name}", note)
        names = [f"worker{rank}" for rank in range(workers)]
        return [self.read(f"{key}/{name}", str, name) for name in names]

    def collect(self, key: str, note: str, workers: int, lost: Collection[int]) -> list[str]:
        """As `gather`, where workers may be `lost` meanwhile: the first who is there collects what
        is left, and all go by that."""
        self.leave(f"{key}/{self._name}", note)
        end = time.monotonic() + self._seconds
        while not self.has(f"{key}/all"):
            there = [rank for rank in range(workers) if rank not in lost]
            missing = [f"worker{r}" for r in there if not self.has(f"{key}/worker{r}")]
            if not missing and self._name == f"worker{there[0]}":
                found = [f"{key}/worker{rank}" for rank in range(workers)]
                notes = [self.read(own, str, own) for own in found if self.has(own)]
                self.leave(f"{key}/all", notes)
            elif time.monotonic() > end:
                operation = f"{self._name} reads the notes {key}"
                raise DeadlineError(operation, self._seconds, missing or [f"worker{there[0]}"])
            else:
                time.sleep(COLLECTING_SECONDS)
        return self.read(f"{key}/all", list[str], "worker0")

    def read_unless_lost(
        self, key: str, kind: type[T], rank: int, lost: Collection[int] | None
    ) -> T:
        """As `read`, where its author may be `lost` meanwhile: raises LookupError then."""
        end = time.monotonic() + self._seconds
        while lost is not None and not self.has(key) and time.monotonic() < end:
            if rank in lost:
                raise LookupError(key)
            time.sleep(COLLECTING_SECONDS)
        return self.read(key, kind, f"worker{rank}")

    def key(self, given: str, leads: bool) -> JobKey:
        """The job's key: the launcher's, or one that worker 0 makes where it gave none."""
        if given:
            return JobKey(given)
        if leads:
            self.leave("key", secrets.token_hex(32))
        return JobKey(self.read("key", str, "worker0"))
