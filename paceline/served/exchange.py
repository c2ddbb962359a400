"""One exchange, open: what a worker needs of it, and the main function of a server member.

What is exchanged is fixed while it is open. A script that trains something else later opens the
next one: each is an *opening*, with notes of its own in the store.
"""

import itertools
import math
from dataclasses import replace

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from paceline import spec
from paceline.collectives.context import Context
from paceline.collectives.notes import Meeting
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.membership import CrewBook
from paceline.served import setup
from paceline.served.shapes import Exchanged

CLOSING_SECONDS = 5.0
"""How long a worker that failed goes on serving the others."""


class Exchange:
    """Tensors in, weights or mean gradients out, chunk by chunk; knows nothing of autograd."""

    def __init__(
        self, options: spec.Server, context: Context, exchanged: Exchanged, opening: int = 0
    ) -> None:
        self.exchanged, self._context, self._opening = exchanged, context, opening
        self._member = setup.set_up_worker(options, of_opening(context, opening), exchanged)
        self.worker, self.held = self._member.worker, self._member.held
        self._read = self._member.read
        self.layout, self.meeting = self._member.plan.layout, self._member.meeting
        self.is_shared = self._member.plan.rules.shared
        founders = () if context.identity.has_joined else range(context.identity.workers)
        self._book = CrewBook(founders)
        self.lost_servers: list[str] = []
        if context.identity.has_joined:
            context.membership.joined_at(self.worker.machine.step)
            self.greet(self.worker.machine.step)

    def view(self, index: int) -> Tensor:
        """What has come for a tensor, in its shape."""
        return self._read.parameter(index, self.exchanged.tensors[index])

    def sent_from(self, index: int) -> Tensor:
        """A row of memory from which servers take a tensor's gradient; if they share none, the
        tensor itself."""
        gradients = self._member.gradients
        if gradients is None or self.is_apart:
            return self.exchanged.tensors[index]
        return gradients.row(index)

    @property
    def leader(self) -> int:
        return self._book.leader

    @property
    def joined(self) -> list[str]:
        """Workers that take part and were not there from the start."""
        founders = self._context.identity.founders or self._context.identity.workers
        return [f"worker{rank}" for rank in sorted(self._book.crew) if rank >= founders]

    @property
    def leads(self) -> bool:
        identity = self._context.identity
        return not identity.has_joined and identity.rank == self.leader

    @property
    def is_apart(self) -> bool:
        """What tensors read is a copy on their device of what this host holds."""
        return self._read is not self.held

    def fill(self) -> None:
        """Give a copy on the device the tensors' own values, before they read from there."""
        if self.is_apart:
            setup.write_tensors(self.exchanged.tensors, self._read)

    def collect(self) -> None:
        """Have in this host's memory what was written to a copy on the device."""
        if self.is_apart:
            views = [self.view(index) for index in range(len(self.exchanged.tensors))]
            setup.write_tensors(views, self.held)

    def greet(self, steps: float = math.inf) -> None:
        """Take note of who has come or gone; `steps` are done, and the next has not begun."""
        while self.worker.rehomed:
            lost = self.worker.rehomed.popleft()
            if lost.member.startswith("worker"):  # that it is lost is told as a worker's loss
                continue
            self.lost_servers.append(lost.member)
            self._context.membership.server_failed(lost.member, lost.step)
        while self.worker.crew:
            self._book.hear(self.worker.crew.popleft())
        for change in self._book.begin(steps):
            if change.cut is not None:
                # Where everyone takes steps of its own, one may hear of it late.
                until = self.worker.machine.step if steps == math.inf else int(steps)
                for worker in (*change.lost, *change.left):
                    self._context.membership.left_out(
                        worker, change.cut, max(0, until - change.cut)
                    )
            if not change.left or steps < math.inf:  # else this one ends too
                crew = tuple(sorted(self._book.crew))
                self._context.membership.members_changed(crew, change.lost, change.left)

    def gather(self, key: str, note: str) -> list[str]:
        """The notes of all workers, on all of them; of those who failed only what they left."""
        workers = self._context.identity.workers
        if self._context.identity.goes_on:
            return self.meeting.collect(key, note, workers, self.worker.lost)
        return self.meeting.gather(key, note, workers)

    def counters(self) -> dict[str, object]:
        return self._member.counters()

    def _tells_whether_again(self, *, failed: bool) -> bool:
        """Where the others go on without one that fails, or joined and leaves, it says nothing; who
        leads may be lost by then, so all others say the same."""
        identity = self._context.identity
        if not identity.goes_on:
            return self.leads
        is_guest = identity.has_joined and self._book.leader < identity.founders
        return not (failed or is_guest)

    def close(self, *, failed: bool, again: bool = False) -> None:
        """`again`: the next opening follows."""
        self.greet()
        failed = failed or self.worker.failure is not None
        if self._tells_whether_again(failed=failed):
            Meeting(self._context).leave(f"again/{self._opening}", again)
        seconds = CLOSING_SECONDS if failed else self._context.deadline_seconds
        self._member.close(seconds, failed=failed)


def serve(options: spec.Server, context: Context) -> dict[str, object]:
    """The main function of a server member: one opening after the other."""
    counters: dict[str, object] = {}
    for opening in itertools.count():
        member = setup.set_up_server(options, of_opening(context, opening))
        if member is None:
            context.note(f"{context.identity.name} has no share: the workers serve by themselves.")
            return {}
        try:
            member.serve()
            counters.update(member.counters())
        finally:
            member.close(0.0)
        if not Meeting(context).read(f"again/{opening}", bool, "worker0"):
            break
    return counters


def refuse_ended(context: Context) -> None:
    """Raise SpecError if the job that this worker joins has ended meanwhile."""
    try:
        has_ended = Meeting(context).has("again/0")  # where a worker may join, there is one opening
    except ExchangeError:
        has_ended = True
    if has_ended:
        problem = "the job ended before this worker got in."
        raise SpecError("--join", problem, "start another one.")


def of_opening(context: Context, opening: int) -> Context:
    """The same surroundings, with a part of the store for this opening."""
    if context.store is None:
        return context
    return replace(context, store=PrefixStore(f"opening{opening}", context.store))
