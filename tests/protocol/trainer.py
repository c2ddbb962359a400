"""A worker's script on the test network: what it computes, waits for and tells its machine."""

from paceline.protocol.actions import Configured, Exit, Fetch, FetchStates, Ready, Stepped
from paceline.protocol.membership import CrewBook

BEGUN_LATE = -1.0
"""The rate of one who joins: its schedule began when it came."""

SAMPLES = 13
"""In every batch: no number of workers divides it evenly."""


class Trainer:
    """A script: gradients in any order, then wait for every weight, then the next step."""

    def __init__(self, member, chunks, steps, *, script, joins=False):
        self.member, self.machine, self.chunks = member, member.worker, chunks
        self.script, self.steps, self.joins, self.is_new = script, steps, joins, joins
        self.taken = 0
        self.unmade, self.normed, self.stepped = set(), -1, True
        self.fetched, self.states, self.settled = -1, set(), -1
        self.done = False
        self.book = CrewBook(() if joins else range(self.machine._plan.workers))
        self.shared = {}
        """Step -> those with whom it has made it."""

    def has_started(self):
        """One that joins begins when it was admitted and has all weights."""
        if self.joins and self.machine.generation > 0 and not self.machine.outstanding:
            self.joins = False
        return not self.joins

    def compute(self, chunk, rng):
        self.unmade.remove(chunk)
        mean, hold = (self.script.get(name, False) for name in ("mean", "touches"))
        crew = self.latest
        weight = len(part(crew, self.machine.worker)) * len(crew) / SAMPLES
        inside = self.machine._plan.layout.chunks[chunk].parameters
        few = rng.randrange(len(inside)) if self.script.get("skips") else 0
        absent = tuple(sorted(rng.sample(inside, few)))
        self.member.tell(Ready(chunk, absent=absent, mean=mean, hold=hold, weight=weight))

    def settle(self):
        """Do what the script does when it can: step, begin the next, or end."""
        if self.done or self.unmade or not self.has_started():
            return
        if not self.stepped:
            if self.script.get("touches"):
                if self.normed < self.machine.step - 1:
                    return
                self.member.tell(Stepped(scale=0.5))
            self.stepped = True
            self.taken += 1
            self.divide()
        is_hasty = self.script.get("hasty") and self.is_last()
        if self.machine.outstanding and not is_hasty:
            return
        if self.script.get("fetches") and not self.has_fetched():
            return
        if self.script.get("settles") and not self.has_settled():
            return
        if self.is_last():
            self.done = True
            self.member.tell(Exit())
            return
        if self.machine.generation > 0:
            self.divide()
        self.shared[self.machine.step] = self.latest = self.book.crew
        if self.script.get("schedule"):
            rate = BEGUN_LATE if self.machine.generation > 0 else float(self.machine.step)
            self.member.tell(Configured([{"lr": rate}]))
        self.unmade, self.stepped = set(range(self.chunks)), False

    def has_fetched(self):
        """Between two steps it asks for the optimizer's state, and waits for all of it."""
        if self.fetched < self.machine.step:
            self.fetched, self.states = self.machine.step, set()
            self.member.tell(FetchStates())
        return len(self.states) == self.chunks

    def has_settled(self):
        """Between two steps it asks for the weights, and waits for all of them."""
        if self.settled < self.machine.step:
            self.settled = self.machine.step
            self.member.tell(Fetch())
        if self.machine.outstanding:
            return False
        newest = min(self.machine._versions)
        assert not self.names_steps or newest >= self.machine.step, "its own steps are not in them"
        return True

    def divide(self):
        """The next step's samples are divided among those who are known to be there by now."""
        list(self.book.begin(self.machine.step))

    def is_last(self):
        """Where workers are waited for all end at the same step; else each makes its own number."""
        return (self.machine.step if self.names_steps else self.taken) >= self.steps

    @property
    def names_steps(self):
        return self.machine._plan.rules.waits_for_all


def part(crew, worker):
    """The samples of a batch that are this worker's."""
    assert worker in crew, f"worker {worker} takes part and shares nothing"
    place = sorted(crew).index(worker)
    return range(place * SAMPLES // len(crew), (place + 1) * SAMPLES // len(crew))
