"""How a TensorFlow 1.x worker deals with its servers: the same messages, another order.

It fetches every variable when a step begins, in an order that is another each time (its executor
asks for all at once, and knows nothing of which is used first), and returns every gradient as it is
made; the next step begins when all are applied. Stands where
`ExchangeMachine` stands in a simulation.
"""

import random
from collections.abc import Sequence

from paceline.protocol.actions import Action, Event, Fetch, Ready, Send, Usable
from paceline.protocol.messages import Answer, Message, Pull, Push


class PullingWorker:
    """One worker's view of all variables."""

    def __init__(self, worker: int, owners: Sequence[str], chance: random.Random) -> None:
        """`owners`: the member that serves each chunk."""
        self.worker, self._owners, self._chance = worker, tuple(owners), chance
        self._step = self._made = 0
        self._unapplied: set[int] = set()
        self._asked: set[int] = set()

    @property
    def outstanding(self) -> frozenset[int]:
        """Chunks that were asked for and have not come."""
        return frozenset(self._asked)

    @property
    def applied(self) -> bool:
        """Every gradient of the last step is in the servers' weights."""
        return not self._unapplied

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Fetch():
                order = list(range(len(self._owners)))
                self._chance.shuffle(order)
                self._asked = set(order)
                return [
                    Send(self._owners[chunk], Pull(self.worker, chunk), seat=True)
                    for chunk in order
                ]
            case Ready():
                self._unapplied.add(event.chunk)
                push = Push(self.worker, event.chunk, self._step, self._step)
                self._made = (self._made + 1) % len(self._owners)
                self._step += self._made == 0
                return [Send(self._owners[event.chunk], push, event.chunk, seat=True)]
            case Answer() if event.chunk in self._unapplied:
                self._unapplied.discard(event.chunk)
                return []
            case Answer():
                self._asked.discard(event.chunk)
                return [Usable(event.chunk, event.version)]
        return []
