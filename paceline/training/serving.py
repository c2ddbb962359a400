"""A server member at work: one thread for each call of `distribute` that its workers make."""

import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from paceline import architectures, spec
from paceline.architectures.base import Context
from paceline.training.stores import DEADLINE_SECONDS

SOME, NO_MORE = b"some", b"no more"


def announce(store: Store, number: int, what: bytes) -> None:
    """Worker 0 tells the servers whether there is a `number`th call of `distribute` to serve."""
    store.set(f"to-serve/{number}", what.decode())


def is_to_serve(store: Store, number: int) -> bool:
    """Wait for what worker 0 announces: a script may take its time before it distributes."""
    key = f"to-serve/{number}"
    while True:
        try:
            store.wait([key], timedelta(seconds=DEADLINE_SECONDS))
        except torch.distributed.DistStoreError:
            continue
        return bytes(store.get(key)) == SOME


class Serving:
    """What this member serves, one after the other or side by side."""

    def __init__(self, options: spec.Architecture) -> None:
        self._options = options
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self.counters: dict[str, object] = {}

    def start(self, context: Context) -> None:
        assert context.store is not None
        # A connection of its own: whoever waits on one keeps others from using it.
        store: Any = context.store
        context = replace(context, store=store.clone())
        name = f"paceline-serving-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, args=(context,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Return when all is served; raises what made one of them fail."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _serve(self, context: Context) -> None:
        try:
            self.counters.update(architectures.serve(self._options, context))
        except BaseException as error:
            self._failure = self._failure or error
