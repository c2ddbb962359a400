"""A schedule: one job and all that goes wrong in it, as data. A seed draws it; it can be shrunk."""

import random
from collections.abc import Callable, Iterator

import msgspec

MODES: list[dict[str, object]] = [
    {"mode": "sync"},
    {"mode": "bounded", "staleness": 0},
    {"mode": "bounded", "staleness": 2},
    {"mode": "quorum", "quorum": 1},
    {"mode": "quorum"},
    {"mode": "async"},
]

NAMED = ("sync", "bounded")
"""Modes in which a step waits for workers by name."""


class Trouble(msgspec.Struct, frozen=True):
    """Something that happens after so many events."""

    kind: str
    """kill, join: a worker; kill server; pause: a member does nothing for `events`; cut: nothing
    passes between two members for `events`."""

    after: int
    """Events since the trouble before."""

    who: int = 0
    other: int = 0
    """Which members, counted round among those there are."""

    events: int = 0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a run: replayed, it is the same run."""

    seed: int
    """Of what happens next, among what may."""

    mode: dict[str, object]
    workers: int
    servers: int
    """None: the workers serve."""

    inside: bool = False
    """Workers serve beside servers."""

    chunks: int
    steps: int
    twice: bool = False
    """Messages come twice, the second time later."""

    changes_rate: bool = False
    clips: bool = False
    whole: bool = False
    """Where all are waited for: others go on without the lost, the same in all chunks."""

    hasty: bool = False
    """Scripts end with their last step, and wait for no answers."""

    troubles: tuple[Trouble, ...] = ()


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    mode = rng.choice(MODES)
    return Schedule(
        seed=seed,
        mode=mode,
        workers=rng.randint(1, 4),
        servers=rng.randint(0, 3),
        chunks=rng.randint(1, 5),
        steps=rng.randint(1, 7),
        twice=rng.random() < 0.3,
        changes_rate=rng.random() < 0.3,
        clips=mode["mode"] == "sync" and rng.random() < 0.3,
        troubles=tuple(_trouble(rng) for _ in range(rng.randint(0, 5))),
        whole=mode["mode"] in NAMED and rng.random() < 0.7,
        inside=rng.random() < 0.2,
        hasty=rng.random() < 0.2,
    )


def _trouble(rng: random.Random) -> Trouble:
    return Trouble(
        kind=rng.choice(["kill", "kill server", "join", "pause", "pause", "cut", "cut"]),
        after=rng.randrange(60),
        who=rng.randrange(8),
        other=rng.randrange(8),
        events=rng.randrange(1, 80),
    )


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The smallest schedule near this one that still fails."""
    while (smaller := next(filter(fails, _smaller(schedule)), None)) is not None:
        schedule = smaller
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    replace = msgspec.structs.replace
    troubles = schedule.troubles
    for at in range(len(troubles)):
        yield replace(schedule, troubles=(*troubles[:at], *troubles[at + 1 :]))
    for flag in ("twice", "changes_rate", "clips", "whole", "inside", "hasty"):
        if getattr(schedule, flag):
            yield replace(schedule, **{flag: False})
    for number in ("steps", "chunks", "servers", "workers"):
        value = getattr(schedule, number)
        if value > (0 if number == "servers" else 1):
            yield replace(schedule, **{number: value - 1})
    for at, trouble in enumerate(troubles):
        for field in ("after", "events"):
            value = getattr(trouble, field)
            if value > 1:
                less = replace(trouble, **{field: value // 2})
                yield replace(schedule, troubles=(*troubles[:at], less, *troubles[at + 1 :]))
