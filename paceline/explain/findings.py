"""What an explanation holds. Plain data: the command prints it, the page shows it."""

from typing import Literal

import msgspec

CauseName = str
"""Name of one of `causes.RULES`. Some are not about speed: such a run is never healthy, however
fast it is."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all findings; what is not known is left out of the JSON."""


class Part(Finding, frozen=True, kw_only=True):
    """One part of a step."""

    name: str
    seconds: float
    fraction: float
    """Of the time of the run's steps and the pauses between them."""

    lost_seconds: float
    """What it costs beyond the ideal; these sum to the step minus the ideal."""

    counter: str
    """The figure in the record that proves it."""


class Late(Finding, frozen=True, kw_only=True):
    """The worker the others wait for."""

    worker: str
    reason: Literal["input", "compute", "share", "link", "overhead"]
    """`share`: it computes as fast as the others, and has more samples."""

    seconds: float
    """How much later than the typical worker its gradients are ready, on average."""

    last_fraction: float
    """Share of the steps in which it was the last."""

    factor: float | None = None
    """Its time (or its samples) for the reason over the typical worker's."""

    alike: tuple[str, ...] = ()
    """Others that are as late."""


class Resource(Finding, frozen=True, kw_only=True):
    """Something every step needs for a while; no step is shorter than its busiest resource."""

    name: str
    kind: Literal["compute", "input", "link", "uplink", "server", "cores"]
    member: str
    """Whose it is; empty for the machine's."""

    seconds: float
    counter: str
    relief: float = 0.0
    """By how much throughput would rise if it, and those alike, were twice as fast."""


class Cause(Finding, frozen=True, kw_only=True):
    """A loss worth a sentence."""

    name: CauseName
    seconds: float
    """Per step; 0 where what is wrong is not a loss of time."""

    fraction: float
    """Of the time of the run's steps and the pauses between them."""

    text: str


class Gain(Finding, frozen=True, kw_only=True):
    """By how much throughput would rise: between these, as a share of today's."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class Action(Finding, frozen=True, kw_only=True):
    """What to do next."""

    text: str
    gain: Gain | None = None
    """Against the limit that comes next; left out where the record is not enough to compute it."""

    effort: Literal["flag", "script", "money"] = "flag"
    """What it costs to try: a flag of the same command, a change of the script, or hardware."""

    change: dict[str, object] = {}
    """The same as fields of the experiment (`spec.replace`), where it can be written as such."""


class WallPart(Finding, frozen=True, kw_only=True):
    """A part of the time from start to end."""

    name: str
    seconds: float
    fraction: float


class RateRise(Finding, frozen=True, kw_only=True):
    """A learning rate that rose while the loss was good."""

    step: int
    before: float
    after: float


class Learning(Finding, frozen=True, kw_only=True):
    """What became of the loss, and how old gradients were."""

    first: float
    """Mean of the first losses."""

    last: float
    """Mean of the last ones; NaN becomes absent in JSON, and `not_finite_from` is there."""

    not_finite_from: int | None = None
    chance: float | None = None
    """The loss of guessing: ln(classes)."""

    staleness: float | None = None
    """How many updates behind the weights were that gradients were made from, on average."""

    at_equal_samples: tuple[float, float] | None = None
    """This run's loss and the baseline's when both had seen as many samples."""

    at_equal_seconds: tuple[float, float] | None = None

    best: tuple[int, float] | None = None
    """The step around which losses were least, and their mean there."""

    rate_rise: RateRise | None = None
    """Between the best loss and the last, or the first that is no number."""

    seen_at_backward: bool = False
    """The script reports no loss; it is what backward() was called on."""


class Explanation(Finding, frozen=True, kw_only=True):
    """Where the time of a run went, and what else is to be said of it."""

    run: str
    architecture: str
    workers: int
    status: str
    healthy: bool
    verdict: str
    worker: str = ""
    """Whose step is taken apart: the one in the middle, or the faster of two."""

    steps: int = 0
    step_seconds: float = 0.0
    ideal_seconds: float = 0.0
    ideal: str = ""
    """What the ideal is made of."""

    samples_per_second: float = 0.0
    """In steps alone."""

    samples_per_second_with_pauses: float = 0.0
    parts: tuple[Part, ...] = ()
    wall: tuple[WallPart, ...] = ()
    """The whole time from start to end."""

    causes: tuple[Cause, ...] = ()
    """What is worth a sentence, the worst first; empty for a healthy run."""

    resources: tuple[Resource, ...] = ()
    """The longest first: the one that binds, then what would bind next."""

    limit_seconds: float = 0.0
    """No step of this architecture on these resources is shorter."""

    actions: tuple[Action, ...] = ()
    """The most promising first."""

    late: Late | None = None
    learning: Learning | None = None
    baseline: str = ""
    differs: tuple[str, ...] = ()
    """What differs between the two experiments: "servers: 1, in the baseline 2"."""

    speedup: float | None = None
    """This run's throughput over the baseline's."""

    efficiency: float | None = None
    """Speed-up over the ratio of workers, where the numbers of workers differ."""
