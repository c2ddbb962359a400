"""`server` where servers average and each worker updates: `ring`'s buckets, over servers.

The script keeps its weights, its gradients and its optimizer: whatever it does with them works as
it does alone. It is what a script gets in synchronous modes unless it asks for `update=server`.
"""

from typing import Any

from paceline import spec
from paceline.autograd.averaging import BucketedArchitecture
from paceline.autograd.buckets import Bucket
from paceline.autograd.gradients import uncompiled
from paceline.autograd.trained import Trained
from paceline.collectives.context import Context
from paceline.errors import SpecError
from paceline.protocol.buckets import SERVER_BUCKET_BYTES
from paceline.served.means import ServersCollective
from paceline.served.shapes import note_members, refuse_sparse


class AveragingServer(BucketedArchitecture):
    """One worker's side."""

    def __init__(self, options: spec.Server, context: Context) -> None:
        if context.identity.has_joined:
            problem = "each worker updates its own weights, and servers have none for a new one."
            fix = "start the job with --architecture server:update=server, or with all its workers."
            raise SpecError("--join", problem, fix)
        self._options = options
        self._servers = ServersCollective(options, context)
        super().__init__(
            self._servers,
            context,
            bucket_bytes=SERVER_BUCKET_BYTES,
            allocate=self._servers.allocate,
        )

    def distribute(self, trained: Trained) -> None:
        note_members(self._options, self._context, trained.device)
        refuse_sparse(trained.model)
        super().distribute(trained)
        trained.optimizers[-1].register_step_post_hook(
            uncompiled(lambda *_: self._servers.take_note())
        )

    def _part_with(self, bucket: Bucket) -> None:
        if self._servers.exchange.is_shared:
            self._move_means(bucket)
        else:
            bucket.renew()

    def state(self) -> dict[str, Any]:
        """What compression has left out; a worker without it has nothing of its own."""
        kept = self._servers.exchange.worker.codec.left_out()
        return {"left_out": {c: values.clone() for c, values in kept.items()}} if kept else {}

    def restore(self, state: dict[str, Any], *, own: bool) -> None:
        if own:
            self._servers.exchange.worker.codec.put_back(state["left_out"])

    def counters(self) -> dict[str, object]:
        return self._servers.counters()

    def close(self, *, failed: bool) -> None:
        self._tap.remove()
        self._servers.close(failed=failed)
