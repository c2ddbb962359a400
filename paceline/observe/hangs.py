"""Which ranks of a job wait in which collective, which are missing, and what these did last.

The same rules read what a running job's watchdogs wrote and what a flight recorder left behind.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

import paceline
from paceline.observe.ring import group_name, operation
from paceline.record.entries import Entry


class Call(Entry, kw_only=True):
    """One collective, as one rank called it."""

    group: str
    number: int
    name: str
    sizes: list[list[int]] = msgspec.field(default_factory=list)
    dtypes: list[str] = msgspec.field(default_factory=list)
    line: str = ""
    """The line of the script that called it."""


class Standing(Entry, kw_only=True):
    """What one rank was doing when the job stood still."""

    rank: int
    waits: Call | None = None
    """The first collective that it called and that has not completed."""

    last: Call | None = None
    """The last collective that it has completed."""

    line: str = ""
    """Where its own thread was, in the script."""

    ended: str = ""
    """How its process ended; empty while it runs."""

    group_ranks: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """The ranks of each group that it knows."""

    steps: int | None = None


SITE = ("/site-packages/", "/dist-packages/", "/lib/python3", os.path.dirname(paceline.__file__))
"""Parts of the paths of libraries, and of our own files."""


def script_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """The innermost line of the user's own code: (file, line, function), innermost first."""
    for filename, line, _ in frames:
        if not any(part in filename for part in SITE) and not filename.startswith("<"):
            return f"{filename.rpartition('/')[2]}, line {line}"
    return ""


def call_of(entry: Mapping[str, Any]) -> Call:
    """One entry of a dump."""
    frames = [
        (str(f.get("filename", "")), int(f.get("line", 0)), str(f.get("name", "")))
        for f in entry.get("frames") or []
    ]
    return Call(
        group=group_name(entry),
        number=int(entry.get("collective_seq_id", 0)),
        name=operation(entry),
        sizes=[[int(n) for n in shape] for shape in entry.get("input_sizes") or []],
        dtypes=[str(dtype) for dtype in entry.get("input_dtypes") or []],
        line=script_line(frames),
    )


def is_done(entry: Mapping[str, Any]) -> bool:
    """Whether a collective of a dump has completed."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def standing_of(rank: int, dump: Mapping[str, Any]) -> Standing:
    """What a dump says of one rank."""
    entries = [e for e in dump.get("entries") or [] if not e.get("is_p2p")]
    entries.sort(key=lambda one: int(one.get("record_id", 0)))
    open_ones = [entry for entry in entries if not is_done(entry)]
    done = [entry for entry in entries if is_done(entry)]
    return Standing(
        rank=rank,
        waits=call_of(open_ones[0]) if open_ones else None,
        last=call_of(done[-1]) if done else None,
        group_ranks=_groups(dump),
    )


def _groups(dump: Mapping[str, Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, config in (dump.get("pg_config") or {}).items():
        text = str(config.get("ranks", "")).strip("[]")
        ranks = [int(part) for part in text.split(",") if part.strip().isdigit()]
        found[f"{config.get('name', name)}"] = ranks
    return found


def diagnose(standing: Sequence[Standing], ranks: int) -> list[str]:
    """Sentences, the finding first and then its evidence; empty when no rank waits."""
    waiting = [one for one in standing if one.waits is not None]
    if not waiting:
        return []
    calls = [one.waits for one in waiting if one.waits is not None]
    head = min(calls, key=lambda call: call.number)
    same_group = [one for one in waiting if one.waits is not None and one.waits.group == head.group]
    members = _expected(standing, head.group, ranks)
    differing = _mismatch(same_group)
    absent = [r for r in members if r not in {one.rank for one in same_group}]
    if differing:
        sentence = f"the ranks call different collectives: {differing}."
    elif absent:
        those = [one.rank for one in same_group]
        sentence = f"{_ranks(those)} {_verb(those, 'wait')} in {_call(head)} for {_ranks(absent)}."
    else:
        those = [one.rank for one in same_group]
        sentence = f"{_ranks(those)} are all in {_call(head)}, and it does not complete."
    by_rank = {one.rank: one for one in standing}
    evidence = [_was(rank, by_rank.get(rank)) for rank in absent]
    if differing:
        evidence += [_was(one.rank, one) for one in same_group if one.last is not None]
    return [sentence, *evidence]


def _expected(standing: Sequence[Standing], group: str, ranks: int) -> list[int]:
    name = group.split(" ")[0]
    for one in standing:
        known = one.group_ranks.get(name) or one.group_ranks.get(group)
        if known:
            return known
    return list(range(ranks))


def _mismatch(waiting: Sequence[Standing]) -> str:
    """What differs between the ranks' calls of one number, or in their order; empty if nothing."""
    kinds: dict[str, list[int]] = {}
    for one in waiting:
        assert one.waits is not None, "it waits"
        call = one.waits
        shapes = "" if call.name.startswith("all_gather") else str(call.sizes)
        kinds.setdefault(f"{call.number}/{call.name}/{shapes}", []).append(one.rank)
    if len(kinds) < 2:
        return ""
    by_rank = {one.rank: one.waits for one in waiting}
    numbers = {call.number for call in by_rank.values() if call is not None}
    if len(numbers) > 1:  # one is behind, and will come: it is missing, nothing differs
        names = {call.name for call in by_rank.values() if call is not None}
        if len(names) == 1:
            return ""
    texts = []
    for same in kinds.values():
        first = by_rank[same[0]]
        assert first is not None, "it waits"
        texts.append(f"{_ranks(same)} {_call(first)}")
    return ", ".join(texts)


def _call(call: Call) -> str:
    text = f"{call.name} number {call.number}"
    if call.sizes:
        shape = " and ".join("x".join(map(str, size)) or "1" for size in call.sizes[:3])
        text += f" of {shape} {call.dtypes[0].lower() if call.dtypes else ''}".rstrip()
    if call.group and call.group.split(" ")[0] != "0":
        text += f" in group {call.group}"
    return f"{text} ({call.line})" if call.line else text


def _was(rank: int, one: Standing | None) -> str:
    """What a rank that is missing did last."""
    if one is None:
        return f"rank {rank} left no word."
    did = f"rank {rank}"
    if one.ended:
        did += f" has ended ({one.ended})"
    elif one.line:
        did += f" is at {one.line}"
    else:
        did += " was elsewhere"
    if one.waits is not None:
        did += f", in {_call(one.waits)}"
    if one.last is not None:
        did += f"; its last complete collective is {_call(one.last)}"
    return f"{did}."


def _ranks(ranks: Sequence[int]) -> str:
    names = [f"rank {rank}" for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}, …)"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"
