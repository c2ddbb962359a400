"""A virtual clock: what is due happens in order, and no time passes in between.

    clock = Clock()
    clock.after(0.5, lambda: print(clock.now))
    clock.run()

Things due at the same moment happen in the order in which they were asked for, so a run is the same
each time. Knows nothing of networks or training.
"""

import heapq
import math
from collections.abc import Callable

Then = Callable[[], None]


class Alarm:
    """Something that will happen; `cancel` makes that it does not."""

    __slots__ = ("then",)

    def __init__(self, then: Then) -> None:
        self.then: Then | None = then

    def cancel(self) -> None:
        self.then = None


class Clock:
    """Virtual seconds, from zero."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Alarm]] = []
        self._count = 0

    def after(self, seconds: float, then: Then) -> Alarm:
        """Call `then` when so many seconds have passed."""
        return self.at(self.now + seconds, then)

    def at(self, moment: float, then: Then) -> Alarm:
        """Call `then` at `moment`, or at once where that is past."""
        alarm = Alarm(then)
        self._count += 1
        heapq.heappush(self._due, (max(moment, self.now), self._count, alarm))
        return alarm

    def run(
        self, until: Callable[[], bool] = lambda: False, limit_seconds: float = math.inf
    ) -> bool:
        """Let time pass until `until()` holds (True), nothing is due, or the limit is reached.

        `until` is asked after each thing that happened.
        """
        while not until():
            if not self._due or self._due[0][0] > limit_seconds:
                return False
            self.now, _, alarm = heapq.heappop(self._due)
            if alarm.then is not None:
                alarm.then()
        return True
