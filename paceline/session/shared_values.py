"""Short values that the leading worker decides for all: an order of samples, a seed."""

import time

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.errors import ExchangeError, JobOver
from paceline.session.participants import Participants
from paceline.session.script_group import ScriptGroup
from paceline.session.stores import DEADLINE_SECONDS, POLL_SECONDS, unanswered


class SharedValues:
    """The leader's values, read by the other workers from the store."""

    def __init__(
        self,
        participants: Participants,
        store: Store | None,
        group: ScriptGroup,
        *,
        outlive_leader: bool = False,
    ) -> None:
        self._participants, self._store, self._group = participants, store, group
        self.outlive_leader = outlive_leader
        """When worker 0 fails the next worker decides these values."""

    def agree(self, key: str, own: str, *, kept: bool = False) -> str:
        """Return worker 0's value on every worker. The last to read it takes it out of the store,
        unless it is `kept` for those who join.

        After worker 0 has failed it is the value of the next one. If the store failed with it,
        each worker keeps its own value.
        """
        participants, store = self._participants, self._store
        workers, leader = participants.workers, participants.leader
        if workers == 1 or store is None or (leader != 0 and not self.outlive_leader):
            return own
        if participants.rank == leader:
            store.set(key, own)
            return own
        try:
            if self.outlive_leader or participants.has_joined:
                self._await(store, key, leader)
            value = bytes(store.get(key)).decode()
            if not kept and store.add(f"{key}/read", 1) == workers - 1:
                store.delete_key(key)
                store.delete_key(f"{key}/read")
        except (DistError, RuntimeError) as error:
            operation = "the next batch of a sharded loader"
            raise unanswered(error, participants.identity, operation) from error
        return value

    def agree_during_failure(
        self, key: str, own: str, *, kept: bool = False, is_past: bool = False
    ) -> str:
        """Do the same, also when worker 0 fails while the value is read: where the workers regroup
        they send it to each other."""
        participants, store = self._participants, self._store
        if not self._group.regroups():
            return self.agree(key, own, kept=kept)
        assert store is not None, "a job of several workers has a store"
        if is_past:  # the others had agreed on it before this worker joined
            return bytes(store.get(key)).decode()
        value = self._group.from_first(own)
        if participants.rank == participants.leader:
            store.set(key, value)  # for workers that join
        return value

    def _await(self, store: Store, key: str, leader: int) -> None:
        """Return when the leader's value is there.

        If the leader failed in just this step, some may have read what it had drawn and some not.
        """
        participants, end = self._participants, time.monotonic() + DEADLINE_SECONDS
        while not store.check([key]) and time.monotonic() < end:
            if participants.has_joined and store.check([f"ended/worker{leader}"]):
                raise JobOver(
                    f"worker{leader} has finished and draws no more batches: so has "
                    f"{participants.identity.name}, which joined the job."
                ).told()
            if leader in participants.failed_from:
                raise ExchangeError(
                    f"worker{leader} was lost in step {participants.step}, just when it drew the "
                    "next samples of a sharded loader for all workers."
                )
            time.sleep(POLL_SECONDS)
