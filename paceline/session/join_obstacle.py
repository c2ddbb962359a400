"""The reason why no further worker can join a job, as its steps have shown it."""

from torch._C._distributed_c10d import Store

from paceline.launch import Identity

KEY = "newcomers"
"""Name of the reason in the job's store; empty where workers can join."""

UNDIVIDED = "the job's script takes batches that paceline.shard did not divide"

OWN_UPDATES = (
    "its workers update their own weights; with server:update=server the servers have them"
)


class JoinObstacle:
    """Collects the reason on every worker; worker 0 publishes it in the job's store."""

    def __init__(self) -> None:
        self.batches_are_divided = False
        """The workers train on batches that are divided among those who are present."""

        self._reason = ""
        self._published: str | None = None

    @property
    def is_final(self) -> bool:
        """No worker can join this job any more."""
        return bool(self._reason)

    def close(self, reason: str) -> None:
        """Let no worker join from now on. The first reason is the one that is published."""
        self._reason = self._reason or reason

    def publish(self, identity: Identity, store: Store | None) -> None:
        """Called after each step: tell workers that ask to join what this one has shown."""
        reason = self._reason or ("" if self.batches_are_divided else UNDIVIDED)
        if reason == self._published or identity.rank != 0:
            return
        if not (identity.servers or identity.goes_on):
            return
        assert store is not None, "a job of several members has a store"
        store.set(KEY, reason)
        self._published = reason
