"""How members find each other before they can talk: notes left in the job's store."""

import secrets
import time
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore

from paceline.architectures.base import Context
from paceline.errors import DeadlineError, ExchangeError
from paceline.wire import JobKey

T = TypeVar("T")


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
        return key in self._notes if self._store is None else self._store.check([key])

    def read(self, key: str, kind: type[T], author: str) -> T:
        """Return a note, waiting for its author until the deadline."""
        if self._store is None:
            return msgspec.msgpack.decode(self._notes[key], type=kind)
        began = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=self._seconds))
        except (torch.distributed.DistError, RuntimeError) as error:
            if time.monotonic() - began < self._seconds / 2:  # the store is gone, and its keeper
                told = f"{self._name} lost the job's store before it could read the note {key}"
                raise ExchangeError(f"{told}: worker0 has ended.") from error
            operation = f"{self._name} reads the note {key}"
            raise DeadlineError(operation, self._seconds, [author]) from error
        return msgspec.msgpack.decode(bytes.fromhex(self._store.get(key).decode()), type=kind)

    def gather(self, key: str, note: str, workers: int) -> list[str]:
        """Every worker's note; called by all of them, it returns when all have."""
        self.leave(f"{key}/{self._name}", note)
        names = [f"worker{rank}" for rank in range(workers)]
        return [self.read(f"{key}/{name}", str, name) for name in names]

    def key(self, given: str, leads: bool) -> JobKey:
        """The job's key: the launcher's, or one that worker 0 makes where it gave none."""
        if given:
            return JobKey(given)
        if leads:
            self.leave("key", secrets.token_hex(32))
        return JobKey(self.read("key", str, "worker0"))
