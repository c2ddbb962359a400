"""Whether a run learns: losses that are no numbers, that rise, that stay at guessing; staleness.

The price of asynchrony is paid here: stale gradients at a rate that synchronous training bears may
keep a model at chance, however many samples a second it is shown.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, stdev

from paceline import record
from paceline.explain import samples
from paceline.explain.facts import Facts
from paceline.explain.findings import CauseName, Learning, RateRise
from paceline.explain.samples import LEARNT_FRACTION, SPIKE_FACTOR
from paceline.explain.weights import has_reason, objective
from paceline.record.entries import NOT_FINITE

RISEN_FACTOR = 1.3
"""A loss this many times the first one has diverged."""

RISING_STEPS = 4
"""Losses before the first that is not a number, from which a rise can be told."""

SUNK_FACTOR = 100.0
"""A loss so many times as far below zero as it began has nothing that stops it."""

SETTLED_FRACTION = 0.2
"""The first steps of a run may overshoot."""

CHANCE_FRACTION = 0.03
"""How near to ln(classes) a loss is chance's."""

MOST_GUESSED, GUESSED_FRACTION = 20.5, 0.02
"""Classes whose number is guessed from the first losses, at most, and how near those must be."""

THROWN_FACTOR = 2.0
"""A loss this many times guessing's is not where any training starts."""

JUDGED_STEPS = 40
"""Fewer steps are too short to have learnt anything."""

CERTAIN_STEPS = 100
"""A model that guesses after fewer may need more of them: said after what costs time."""

FLAT_STEPS, FLAT_FRACTION = 60, 0.05
"""A loss stands still when after so many steps it has surely not fallen by this share."""

MATTERS_FRACTION = 0.01
"""A fall by less of the loss may be significant, and is no learning."""


FORGOTTEN_FRACTION, FELL_FRACTION = 0.5, 0.3
"""A loss that rose again by this share of what it had fallen, where that was this share of it."""

SURE = 4.0
"""Standard errors between the best losses, the least of many, and the last ones."""

RATE_FACTOR, RATE_STEPS = 2.0, 20
"""A learning rate that rose by this is told beside a loss that rose after it; from so many steps
before the best loss on."""

WINDOW = 10
"""Losses that are averaged at the start and at the end, at most; a tenth of the run when less."""

STALE = 0.5
"""Mean staleness from which it is worth a word."""

DOUBTFUL: tuple[CauseName, ...] = ("chance", "flat", "odd-worker")
"""What may be as it should, and is said after what costs time."""

OF_LEARNING: tuple[CauseName, ...] = (
    *("not-finite", "diverged", "staleness", "same-samples", "sorted-samples"),
    *DOUBTFUL,
)


NORMAL_MOVE = 0.954
"""Median distance of two draws from a normal distribution, in standard deviations."""


def learning(facts: Facts, baseline: Facts | None = None) -> Learning | None:
    """What became of the loss; None where none is known."""
    known = list(facts.losses.values())
    if not known:
        return None
    few, best = _few(known), _best(facts)
    equal = _compared(facts, baseline) if baseline is not None and baseline.losses else (None, None)
    return Learning(
        first=_mean(known[: max(1, few // 3)]),
        last=_mean(known[-few:]),
        not_finite_from=record.not_finite_from(facts.losses),
        chance=_chance(facts),
        staleness=_staleness(facts),
        at_equal_samples=equal[0],
        at_equal_seconds=equal[1],
        best=best,
        rate_rise=_rate_rise(facts, best),
        seen_at_backward=_is_seen(facts),
    )


def wrong_number(facts: Facts) -> str:
    """What workers saw that is not a number, where the script told no loss; empty for nothing."""
    seen = [event.text for event in facts.events if event.kind == NOT_FINITE]
    return seen[0].partition(";")[0] if seen and not facts.losses else ""


def first_wrong(facts: Facts) -> str:
    """The one worker with whom wrong numbers began; empty where several began together.

    Steps of workers that do not wait for each other are not simultaneous: they name no worker.
    """
    if not facts.together:
        return ""
    told = [(e.step, e.member) for e in facts.events if e.kind == NOT_FINITE and e.step is not None]
    if len(facts.workers) < 2 or not told:
        return ""
    first = min(step for step, _ in told)
    members = {member for step, member in told if step == first}
    return members.pop() if len(members) == 1 else ""


def finite(facts: Facts) -> dict[int, float]:
    """The losses up to the first that is not a number."""
    wrong = record.not_finite_from(facts.losses)
    return {
        step: loss
        for step, loss in facts.losses.items()
        if math.isfinite(loss) and (wrong is None or step < wrong)
    }


def trouble(facts: Facts, found: Learning | None) -> CauseName | None:
    """What is wrong with the loss, by name."""
    if wrong_number(facts):
        return "not-finite"
    if found is None:
        return None
    stale = found.staleness is not None and found.staleness >= STALE
    if has_sunk(facts, found):
        return "diverged"
    if found.not_finite_from is not None:
        return "diverged" if _rose_before_wrong(facts, found) else "not-finite"
    if samples.sorted_labels(facts) is not None or samples.jumps(facts):
        return "sorted-samples"
    if has_risen(facts, found) or _has_spike(facts, found) or has_forgotten(facts, found):
        return (
            "staleness"
            if stale and not _rate_is_absurd(list(facts.losses.values()))
            else "diverged"
        )
    if has_reason(facts) and (stands_still(facts) or at_chance(facts, found)):
        return "flat"
    if at_chance(facts, found):
        return "staleness" if stale else "chance"
    worse = found.at_equal_samples
    if stale and worse is not None and worse[0] > (1 + 4 * LEARNT_FRACTION) * worse[1]:
        return "staleness"
    return "flat" if stands_still(facts) else None


def troubles(facts: Facts, found: Learning | None) -> list[CauseName]:
    """All that is wrong with losses, and with what workers learn from."""
    names: list[CauseName] = []
    if samples.sees_the_same(facts):
        names.append("same-samples")
    wrong, odd = trouble(facts, found), samples.odd_worker(facts)
    if wrong is not None:
        names.append(wrong)
    if odd is not None:
        # What one worker brings throws all off: that is then where to look first.
        spoils = wrong in ("diverged", "not-finite")
        names.insert(len(names) - 1 if spoils else len(names), "odd-worker")
    return names


def is_certain(facts: Facts, name: CauseName, all_wrong: Sequence[CauseName]) -> bool:
    """Whether it comes before what costs time. A loss that has not moved yet does not."""
    if name == "odd-worker":
        spoilt = "diverged" in all_wrong or "not-finite" in all_wrong
        return spoilt or samples.is_left_behind(facts)
    if name == "flat":
        return has_reason(facts)
    return name not in DOUBTFUL or (name == "chance" and len(facts.losses) >= CERTAIN_STEPS)


def has_sunk(facts: Facts, found: Learning) -> bool:
    """Whether a loss falls without an end: far below zero, or a known loss with its sign turned."""
    known = list(finite(facts).values())
    if not known:
        return False
    if min(known) < -SUNK_FACTOR * max(1.0, abs(known[0])):
        return True
    return bool(objective(facts).get("negated")) and max(known) < 0


def _rose_before_wrong(facts: Facts, found: Learning) -> bool:
    """Whether losses had risen far before one was not a number."""
    known = list(finite(facts).values())
    if len(known) < RISING_STEPS:
        return False
    return max(known) > max(SPIKE_FACTOR * abs(known[0]), abs(known[0]) + 1)


def has_risen(facts: Facts, found: Learning) -> bool:
    """Losses below zero have no scale: what they rose by is told against how far they are."""
    rose, known = found.last - found.first, list(facts.losses.values())
    error = _noise(known) * math.sqrt(1 / _few(known) + 1 / max(1, _few(known) // 3))
    return rose > max(0.1, (RISEN_FACTOR - 1) * abs(found.first), 2 * error)


def has_forgotten(facts: Facts, found: Learning) -> bool:
    """Whether a loss that had fallen far has risen again, for good."""
    if found.best is None or len(facts.losses) < JUDGED_STEPS:
        return False
    known = list(facts.losses.values())
    fell, rose = found.first - found.best[1], found.last - found.best[1]
    if fell < FELL_FRACTION * abs(found.first) or rose < FORGOTTEN_FRACTION * fell:
        return False
    return rose > SURE * _noise(known) * math.sqrt(2 / _few(known))


def at_chance(facts: Facts, found: Learning) -> bool:
    """Whether the run had the time to learn, and guesses."""
    chance = found.chance
    if chance is None or len(facts.losses) < JUDGED_STEPS:
        return False
    near = abs(found.last - chance) <= CHANCE_FRACTION * chance
    if found.last > (1 - LEARNT_FRACTION) * found.first:
        return near
    # Where the first steps threw it far off it has fallen, and guesses if it stands still there.
    known = list(facts.losses.values())
    middle = _mean(known[len(known) // 2 :][:WINDOW])
    still = abs(middle - chance) <= CHANCE_FRACTION * chance
    return near and still and found.first > THROWN_FACTOR * chance


def guess_near(loss: float) -> int:
    """Return the number of classes among which guessing costs this much; 0 where it is unclear.

    Of few classes only, whose logarithms are far apart.
    """
    if not math.log(1.9) < loss < math.log(MOST_GUESSED):
        return 0
    classes = round(math.exp(loss))
    return classes if abs(loss / math.log(classes) - 1) < GUESSED_FRACTION else 0


def stands_still(facts: Facts) -> bool:
    """Whether a loss has surely not fallen; noise in which a fall could hide is no standstill."""
    known = list(facts.losses.values())
    meaningless = facts.experiment.workload.script is None and _chance(facts) is None
    if len(known) < FLAT_STEPS or meaningless or not all(map(math.isfinite, known)):
        return False
    quarter = len(known) // 4
    first, last = known[:quarter], known[-quarter:]
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / quarter)
    fell = fmean(first) - fmean(last)
    size = abs(fmean(first))
    matters = fell > max(2 * error, MATTERS_FRACTION * size)
    return not matters and abs(fell) + 2 * error < FLAT_FRACTION * size


def _has_spike(facts: Facts, found: Learning) -> bool:
    """A loss far above the first one on the way, unless it was early and is long forgotten."""
    step, loss = worst(facts)
    early = step < min(facts.losses) + SETTLED_FRACTION * len(facts.losses)
    forgotten = early and found.last < (1 - LEARNT_FRACTION) * found.first
    return loss > max(SPIKE_FACTOR * found.first, found.first + 1) and not forgotten


def worst(facts: Facts) -> tuple[int, float]:
    """The step with the largest finite loss, and that loss."""
    finite = {step: loss for step, loss in facts.losses.items() if math.isfinite(loss)}
    step = max(finite, key=lambda number: finite[number])
    return step, finite[step]


def _best(facts: Facts) -> tuple[int, float] | None:
    """The step around which losses were least, and their mean there."""
    finite = [(step, loss) for step, loss in facts.losses.items() if math.isfinite(loss)]
    few = _few(finite)
    places = range(len(finite) - few + 1)
    means = [fmean(loss for _, loss in finite[k : k + few]) for k in places]
    if not means:
        return None
    least = min(places, key=lambda k: means[k])
    return finite[least + few // 2][0], means[least]


def _rate_rise(facts: Facts, best: tuple[int, float] | None) -> RateRise | None:
    """A learning rate that rose between the best loss and what became of it."""
    rates = {s.step: s.learning_rate for s in facts.typical.entries if s.learning_rate is not None}
    if best is None or not rates:
        return None
    wrong = record.not_finite_from(facts.losses)
    last = wrong if wrong is not None else max(facts.losses)
    since = min(best[0], last) - RATE_STEPS
    known = [step for step in rates if since <= step <= last]
    rises = [step for step in known if rates[step] >= RATE_FACTOR * rates[known[0]] > 0]
    if not rises:
        return None
    before, after = rates[known[0]], max(rates[step] for step in rises)
    return RateRise(step=rises[0], before=before, after=after)


def _rate_is_absurd(losses: Sequence[float]) -> bool:
    """Stale gradients stop a model from learning; they do not take its loss to the stars."""
    return max(losses) > 1e3 * max(losses[0], 1e-9)


def _is_seen(facts: Facts) -> bool:
    """Whether no script reported the loss: it is what backward was called on."""
    counts = [member.counters.get("script") for member in facts.members]
    return any(isinstance(count, dict) and count.get("losses_seen") for count in counts)


def _chance(facts: Facts) -> float | None:
    """The loss of guessing, from the labels that were seen or the classes of the data set."""
    guess = objective(facts).get("guess")
    if isinstance(guess, float):
        return guess
    for member in facts.members:
        classes = member.results.get("num_classes")
        if classes is not None and classes >= 2:
            return math.log(classes)
    return None


def _staleness(facts: Facts) -> float | None:
    stale, found = not facts.architecture.exclusive, facts.summary.staleness
    return found.get("mean") if stale and found else None


def _compared(
    facts: Facts, baseline: Facts
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Both runs' losses at as many samples, and after as many seconds of training."""
    own, other = _curve(facts), _curve(baseline)
    found = []
    for axis in (0, 1):
        end = min(own[-1][axis], other[-1][axis])
        pair = (_at(own, axis, end), _at(other, axis, end))
        found.append(pair if all(math.isfinite(loss) for loss in pair) else None)
    return found[0], found[1]


def _curve(facts: Facts) -> list[tuple[float, float, float]]:
    """Samples seen, seconds of training, loss."""
    batch = sum(worker.samples for worker in facts.workers)
    step = facts.typical.step_seconds + facts.typical.paused_seconds
    return [((n + 1) * batch, (n + 1) * step, loss) for n, loss in facts.losses.items()]


def _at(curve: Sequence[tuple[float, float, float]], axis: int, place: float) -> float:
    """Mean loss of the last few steps before a place on an axis."""
    before = [point[2] for point in curve if point[axis] <= place * 1.000001]
    few = _few(before)
    return _mean(before[-few:])


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if losses else math.nan


def _few(known: Sequence[object]) -> int:
    """How many losses are averaged."""
    return max(1, min(WINDOW, len(known) // 10))


def _noise(losses: Sequence[float]) -> float:
    """Standard deviation around whatever way the losses go, from one to the next."""
    moves = [abs(b - a) for a, b in pairwise(losses) if math.isfinite(a) and math.isfinite(b)]
    return median(moves) / NORMAL_MOVE if moves else 0.0
