"""A member's loop: one thread that owns its sockets and runs whichever sides it has."""

import threading
import time
from collections.abc import Callable

import torch

from paceline.architectures.server.control import AnyMessage
from paceline.architectures.server.exchange import WorkerSide
from paceline.architectures.server.serving import ServerSide
from paceline.wire import Post

TURN_SECONDS = 0.0005
"""How long a server works before it looks again at what has come."""

IDLE_SECONDS = 0.2
"""How often a loop with nothing to do looks whether it should end."""


class MemberLoop:
    """Takes parcels to the worker's side and the server's side until told to stop."""

    def __init__(
        self, post: Post[AnyMessage], worker: WorkerSide | None, server: ServerSide | None
    ) -> None:
        self.post, self.worker, self.server = post, worker, server
        if server is not None and worker is not None:
            server.deliver = worker.handle
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name="paceline-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        self._stopping.set()
        self.post.wake()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until `until()` holds; in the calling thread."""
        with torch.no_grad():
            self._run(until)

    def _run(self, until: Callable[[], bool]) -> None:
        post, worker, server = self.post, self.worker, self.server
        while not until():
            busy = server is not None and server.has_work
            parcels = post.receive(0.0 if busy else IDLE_SECONDS)
            arrived = time.monotonic()
            if worker is not None:
                worker.drain()
            for parcel in parcels:
                if parcel.for_server and server is not None:
                    server.handle(parcel, arrived)
                elif worker is not None:
                    worker.handle(parcel)
                    worker.drain()
            if server is not None:
                server.work(arrived + TURN_SECONDS)
                if not server.has_work:
                    server.flush()

    def _guarded(self) -> None:
        try:
            self.run(self._stopping.is_set)
        except BaseException as error:
            if self.worker is None:
                raise
            self.worker.fail(error)
