"""The entries of a run's files: what one step, one second, one member left behind.

All are msgspec structures written as JSON. Unknown is absent (None is left out), never zero.
"""

import msgspec

PHASES = ("input", "forward", "backward", "exchange_exposed", "update", "wait")
"""Where a step's time may go, in the order a step meets them."""


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of what files hold; fields at their default are left out of the file."""


class Step(Entry, kw_only=True):
    """One optimizer step of one worker. Times are seconds on this host's monotonic clock."""

    step: int
    start_seconds: float
    end_seconds: float
    breakdown_seconds: dict[str, float]
    """Seconds per phase. `wait` is told from `exchange_exposed` when all workers are known."""

    samples: int
    ready_seconds: float | None = None
    """When the last gradient of this worker was ready to be exchanged."""

    loss: float | None = None
    learning_rate: float | None = None


class Sample(Entry, kw_only=True):
    """What the machine did for one member since the sample before."""

    time_seconds: float
    """On this host's monotonic clock."""

    cpu_fraction: float | None = None
    """Share of one core; 2.0 is two cores busy."""

    rss_bytes: int | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    packets_sent: int | None = None
    packets_received: int | None = None


class Event(Entry, kw_only=True):
    """Something worth a line: a member lost, a fallback taken, a link changed."""

    time_seconds: float
    member: str
    kind: str
    text: str
    step: int | None = None


class Member(Entry, kw_only=True):
    """What one member was and did in all."""

    name: str
    role: str
    host: str
    status: str = "running"
    """running, finished, failed, or lost: gone while the others went on."""

    pid: int | None = None
    cpu_fraction: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    packets_sent: int | None = None
    packets_received: int | None = None
    max_rss_bytes: int | None = None
    clock_offset_seconds: float | None = None
    """Add it to this member's times to get worker 0's."""

    versions: dict[str, str] = msgspec.field(default_factory=dict)
    counters: dict[str, object] = msgspec.field(default_factory=dict)
    """What only this architecture counts: staleness, late gradients, queueing …"""

    results: dict[str, float] = msgspec.field(default_factory=dict)
    """Figures found at the end, such as accuracy."""


class StepSeconds(Entry, kw_only=True):
    """Time of one step over all workers and counted steps."""

    median: float
    p95: float
    jitter: float
    """Median distance from the median."""


class Loss(Entry, kw_only=True):
    first: float
    last: float


class Summary(Entry, kw_only=True, omit_defaults=False):
    """The JSON of a run (DESIGN section 6)."""

    format_version: int
    status: str
    name: str
    engine: str
    architecture: str
    workers: int
    servers: int
    model: str
    data: str
    global_batch: int
    members: list[Member]
    steps: int | msgspec.UnsetType = msgspec.UNSET
    samples_per_second: float | msgspec.UnsetType = msgspec.UNSET
    step_seconds: StepSeconds | msgspec.UnsetType = msgspec.UNSET
    breakdown_seconds: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    loss: Loss | msgspec.UnsetType = msgspec.UNSET
    accuracy: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    staleness: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    epoch_seconds: float | msgspec.UnsetType = msgspec.UNSET
    speedup: float | msgspec.UnsetType = msgspec.UNSET
    efficiency: float | msgspec.UnsetType = msgspec.UNSET
    limit_seconds: float | msgspec.UnsetType = msgspec.UNSET
    verdict: str | msgspec.UnsetType = msgspec.UNSET
    interval: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """Of a prediction: `low` and `high` samples per second, between which nine of ten lie."""

    limited_by: str | msgspec.UnsetType = msgspec.UNSET
    """Of a prediction: the resource that is needed longest in a step."""

    notes: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Fallbacks taken and anything emulated, in words."""
