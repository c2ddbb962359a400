"""The coordinator's machine: it announces the views of a job (`views.py`)."""

from collections.abc import Collection, Sequence

import msgspec

from paceline.errors import ExchangeError
from paceline.protocol.actions import Action, Event, Lost, Send
from paceline.protocol.messages import Message
from paceline.protocol.placement import worker_of
from paceline.protocol.views import Change, End, Enroll, GiveUp, Position, View


class Coordinator:
    """Announces views. What follows from its state is derived anew after each event."""

    def __init__(self, workers: int) -> None:
        self.view: View | None = None
        self.number = 0
        """Of the newest view that was announced or asked for."""
        self._initial = frozenset(range(workers))
        self._candidates: dict[int, Enroll] = {}
        """Workers that ask to take part and are in no view."""
        self._hosts: dict[int, str] = {}
        self._positions: dict[int, Position] = {}
        """Those of the change under way, and of participants that are done."""
        self._failed: set[int] = set()
        """Participants of the view that have failed."""
        self._leaving: set[int] = set()
        """Participants that are done, and whose others may not be."""
        self._stateless: set[int] = set()
        """Participants that have joined and have not received the state."""
        self._asked: frozenset[int] | None = None
        """The participants without whom the change under way goes on; None while there is none."""
        self._why = ""
        self._dismissed: set[int] = set()

    @property
    def remaining(self) -> tuple[int, ...]:
        """Participants of the view that have not failed."""
        view = self.view
        return () if view is None else tuple(w for w in view.participants if w not in self._failed)

    @property
    def is_over(self) -> bool:
        """Every participant has finished or failed, or the job cannot continue."""
        return bool(self._why) or (self.view is not None and self._done.issuperset(self.remaining))

    @property
    def _done(self) -> set[int]:
        return {worker for worker, position in self._positions.items() if position.is_done}

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Enroll():
                self._candidates[event.worker] = event
                self._dismissed.discard(event.worker)
            case Position():
                self._take(event)
            case GiveUp():
                self._why = self._why or f"worker{event.worker} gave up: {event.why}"
            case Lost():
                self._lose(worker_of(event.member))
            case _:
                raise ExchangeError(f"a coordinator cannot handle {event!r}.")
        actions: list[Action] = []
        while derived := self._derive():
            actions += derived
        return actions

    def _take(self, position: Position) -> None:
        worker = position.worker
        if worker not in self.remaining:
            return
        if position.exchanges >= 0:
            self._stateless.discard(worker)
        if position.view == self.number or position.is_done:
            self._positions[worker] = position
        if position.leaves:
            self._leaving.add(worker)

    def _lose(self, worker: int | None) -> None:
        if worker is None:
            return
        self._candidates.pop(worker, None)
        if self.view is None and worker in self._initial:
            failed = f"worker{worker} failed before all workers had met"
            self._why = self._why or f"{failed}; start the job again."
        elif worker in self.remaining and not self.is_over:
            self._failed.add(worker)

    def _derive(self) -> list[Action]:
        """The next thing that follows from what is known; empty once nothing does."""
        if self.is_over:
            return self._dismiss({*self.remaining, *self._candidates}, self._why)
        if self.view is None:
            return self._begin() if self._initial <= self._candidates.keys() else []
        if self._candidates and self._done - self._leaving:
            return self._dismiss(self._candidates, "")
        if self._must_ask():
            return self._ask()
        has_all = self._asked is not None and self._positions.keys() >= set(self.remaining)
        return self._announce() if has_all else []

    def _dismiss(self, workers: Collection[int], why: str) -> list[Action]:
        """Tell them, once, that the job is over."""
        workers = sorted(set(workers) - self._dismissed)
        self._dismissed.update(workers)
        for worker in workers:
            self._candidates.pop(worker, None)
        failed = tuple(sorted(self._failed - self._done))
        return [Send(f"worker{worker}", End(why, failed)) for worker in workers]

    def _begin(self) -> list[Action]:
        self.number += 1
        workers = tuple(sorted(self._initial))
        return self._tell(View(self.number, workers, self._admit(workers)))

    def _admit(self, workers: Sequence[int]) -> tuple[str, ...]:
        """Make candidates among these participants; returns the hosts of all."""
        entered = {worker: self._candidates.pop(worker, None) for worker in workers}
        self._hosts |= {w: enroll.host for w, enroll in entered.items() if enroll is not None}
        return tuple(self._hosts[worker] for worker in workers)

    def _must_ask(self) -> bool:
        if self._gone - (self._asked or frozenset()):
            return True
        return bool(self._candidates) and not self._stateless and self._asked is None

    @property
    def _gone(self) -> frozenset[int]:
        return frozenset(self._failed | self._leaving)

    def _ask(self) -> list[Action]:
        self.number += 1
        self._asked = self._gone
        done = self._done
        self._positions = {w: p for w, p in self._positions.items() if w in done}
        change = Change(self.number, tuple(sorted(self._asked)))
        return [Send(f"worker{worker}", change) for worker in self.remaining if worker not in done]

    def _announce(self) -> list[Action]:
        assert self.view is not None
        positions = [self._positions[worker] for worker in self.remaining]
        for one in positions:
            if one.exchanges < 0:  # it asks again, and the view after this one takes it in
                self._candidates[one.worker] = Enroll(one.worker, self._hosts[one.worker])
        active = [one for one in positions if one.exchanges >= 0]
        if why := why_not(active):
            names = " and ".join(f"worker{worker}" for worker in sorted(self._failed))
            self._why = f"{names} failed, and the others cannot continue: {why}."
            return self._derive()
        if self._gone:
            at_work = tuple(sorted(self._failed - self._done))
            view = without(self.view, self.number, at_work, self._leaving, active)
        else:
            view = with_joined(self.number, sorted(self._candidates), active)
        self._stateless = set(view.joined)
        self._failed, self._asked = set(), None
        self._leaving.difference_update(view.left)
        self._positions = {
            one.worker: one for one in active if one.is_done and one.worker in view.participants
        }
        return self._tell(msgspec.structs.replace(view, hosts=self._admit(view.participants)))

    def _tell(self, view: View) -> list[Action]:
        self.view = view
        told = [Send(f"worker{worker}", view) for worker in view.participants]
        return [*told, *self._dismiss(view.left, "")]


def why_not(positions: Sequence[Position]) -> str:
    """The reason that no view can follow from these; empty if one can."""
    if not positions:
        return "no participant with the model's state remains"
    newest = max(one.exchanges for one in positions)
    if min(one.exchanges for one in positions) < newest - 1:
        return "participants are more than one exchange apart, which should not be possible"
    lacking = any(one.exchanges < newest for one in positions)
    if lacking and not any(one.exchanges == newest and one.keeps for one in positions):
        return (
            "some had ended the step and some had not, and the script has changed the gradients "
            "since, which the others would need"
        )
    return ""


def without(
    before: View,
    number: int,
    failed: tuple[int, ...],
    leaving: Collection[int],
    positions: Sequence[Position],
) -> View:
    """The view of those that reported these positions, in order of rank.

    A participant that leaves does so once no other one lacks its last result: else it is in this
    view too, and leaves by the next one.
    """
    newest = max(one.exchanges for one in positions)
    sources = [one for one in positions if one.exchanges == newest and one.keeps]
    source = sources[0] if sources else positions[0]
    present = sum(one.weight for one in positions)
    samples = sum(one.samples for one in positions)
    share = len(before.participants) / present - 1 if present > 0 else 0.0
    behind = tuple(one.worker for one in positions if one.exchanges < newest)
    left = () if behind else tuple(sorted(leaving))
    staying = [one for one in positions if one.worker not in left]
    return View(
        number,
        participants=tuple(one.worker for one in staying),
        hosts=(),
        redo=True,
        failed=failed,
        left=left,
        first_step=max(one.next_step for one in positions),
        step=max(one.step for one in positions),
        source=source.worker,
        behind=behind,
        summed=source.summed,
        done=tuple(one.worker for one in staying if one.is_done and one.worker not in leaving),
        unseen=max(0, round(samples * share)),
    )


def with_joined(number: int, joined: Sequence[int], positions: Sequence[Position]) -> View:
    """The view of those that reported these positions and of workers that join them."""
    return View(
        number,
        participants=tuple(sorted([*joined, *(one.worker for one in positions)])),
        hosts=(),
        joined=tuple(joined),
        first_step=max(one.entry_step for one in positions),
        step=max(one.step for one in positions),
        source=positions[0].worker,
    )
