"""A server member at work: one thread for each call of `distribute` that its workers make."""

import threading

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from paceline import architectures, spec
from paceline.collectives.context import Context

SOME, NO_MORE = b"some", b"no more"
POLL_SECONDS = 0.2
NOTICE_SECONDS = 5.0


def announce(store: Store, number: int, what: bytes) -> None:
    """Worker 0 tells the servers whether there is a `number`th call of `distribute` to serve."""
    store.set(f"to-serve/{number}", what.decode())


class Serving:
    """Serves the calls of `distribute` on this member, one after the other or side by side."""

    def __init__(self, options: spec.Architecture) -> None:
        self._options = options
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._failed = threading.Event()
        self.counters: dict[str, object] = {}

    def start(self, context: Context) -> None:
        name = f"paceline-serving-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, args=(context,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def is_more(self, store: Store) -> bool:
        """Wait for what worker 0 announces: a script may take its time before it distributes.

        What fails meanwhile is raised here: the workers would wait for it in vain.
        """
        key = f"to-serve/{len(self._threads)}"
        try:
            while not store.check([key]):
                self._failed.wait(POLL_SECONDS)
                self._raise_failure()
            return bytes(store.get(key)) == SOME
        except DistNetworkError:
            # Worker 0 keeps the store. What is served hears of its end too, and knows the step.
            self._failed.wait(NOTICE_SECONDS)
            self._raise_failure()
            raise

    def wait(self) -> None:
        """Return when all is served; raises what makes one of them fail."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                self._raise_failure()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _serve(self, context: Context) -> None:
        try:
            self.counters.update(architectures.serve(self._options, context))
        except BaseException as error:
            self._failure = self._failure or error
            self._failed.set()
