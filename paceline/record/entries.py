"""The entries of a run's files: what one step, one second, one member left behind.

All are msgspec structures written as JSON. Unknown is absent (None is left out), never zero.
"""

import math

import msgspec

PHASES = ("input", "forward", "backward", "exchange_exposed", "update", "wait")
"""The phases of a step, in the order a step meets them."""


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of what files hold; fields at their default are left out of the file."""


class Step(Entry, kw_only=True):
    """The record of one optimizer step of one worker. Times are seconds on this host's monotonic
    clock."""

    step: int
    start_seconds: float
    end_seconds: float
    breakdown_seconds: dict[str, float]
    """Seconds per phase. `wait` is told from `exchange_exposed` when all workers are known."""

    samples: int
    ready_seconds: float | None = None
    """The moment when the last gradient of this worker was ready to be exchanged."""

    loss: float | None = None
    not_finite: bool = False
    """The loss is infinite or not a number, which JSON cannot hold; `loss` is read back as NaN."""

    learning_rate: float | None = None
    paused_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """What the worker did besides training since the step before (evaluation, checkpoint, …); no
    part of the step, whose start comes after it."""

    def __post_init__(self) -> None:
        if self.not_finite:
            self.loss = math.nan

    @property
    def seconds(self) -> float:
        """Duration of the step without its pauses."""
        return self.end_seconds - self.start_seconds


class Sample(Entry, kw_only=True):
    """The work of the machine for one member since the sample before."""

    time_seconds: float
    """The moment on this host's monotonic clock."""

    cpu_fraction: float | None = None
    """Share of one core, its child processes' included; 2.0 is two cores busy."""

    children_cpu_fraction: float | None = None
    """The part of it used by processes that the member started, such as a data loader's."""

    cpu_wait_fraction: float | None = None
    """Share of the time that its main thread was ready to run and had no core."""

    machine_cpu_fraction: float | None = None
    """Cores busy on the whole machine, whichever process used them."""

    rss_bytes: int | None = None
    available_bytes: int | None = None
    """Memory of the machine that was still to be had."""

    bytes_sent: int | None = None
    bytes_received: int | None = None
    packets_sent: int | None = None
    packets_received: int | None = None


NOT_FINITE = "not-finite"
"""Kind of the event that tells of a worker's first loss or gradient that is not a number."""

IN_EVALUATION = "in-evaluation"
"""Kind of the event that tells of a model that is trained in evaluation mode."""


TRACED = "traced"
"""Kind of the event that tells of a step that TensorFlow compiles anew, again and again."""


OBSERVED = "observe"
"""Engine of a run that Paceline did not start; its architecture is the one that was observed."""


class RecordedEvent(Entry, kw_only=True):
    """Something worth a line: a member lost, a fallback taken, a link changed."""

    time_seconds: float
    member: str
    kind: str
    text: str
    step: int | None = None
    samples: int | None = None
    """Number of samples that were not trained on because a worker failed."""


class MemberRecord(Entry, kw_only=True):
    """The record of one member: what it was, and its totals."""

    name: str
    role: str
    host: str
    status: str = "running"
    """running, finished, failed, lost (gone while the others went on), or ended (by the launcher,
    because the job was)."""

    pid: int | None = None
    began_seconds: float | None = None
    """The moment when its process was made, on its own clock."""

    ended_seconds: float | None = None
    paused_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds spent besides training after its last step."""

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
    """Counters of its architecture only: staleness, late gradients, queueing …"""

    results: dict[str, float] = msgspec.field(default_factory=dict)
    """Figures found at the end, such as accuracy."""


class CollectiveCall(Entry, kw_only=True):
    """One collective call of one member of an observed job, on its host's monotonic clock."""

    number: int
    """The same on all members of the group, which call it in the same order."""

    group: str
    name: str
    """Name of the call as the library has it, without the backend: all_reduce, broadcast, …"""

    bytes: int | None = None
    arrived_seconds: float
    """The moment when this member called it."""

    blocked_seconds: float | None = None
    """The moment from which on the member did nothing but wait for it."""

    ended_seconds: float | None = None
    """The moment when the member continued; absent if nothing says so."""


class StepSeconds(Entry, kw_only=True):
    """Time of one step over all workers and counted steps."""

    median: float
    p95: float
    jitter: float
    """Median distance of the steps from their median."""


class Loss(Entry, kw_only=True):
    """Means over the global batch. One that is not finite is absent from the file, and NaN here."""

    first: float = math.nan
    last: float = math.nan
    not_finite_from: int | None = None
    """The first step whose loss was infinite or not a number."""

    def __post_init__(self) -> None:  # the one NaN that is left out as a default
        self.first = self.first if math.isfinite(self.first) else math.nan
        self.last = self.last if math.isfinite(self.last) else math.nan


class Summary(Entry, kw_only=True):
    """The figures of a run, as `--json` prints them."""

    format_version: int
    status: str
    """running, finished, failed, interrupted or killed (state.py)."""

    name: str
    engine: str
    architecture: str
    workers: int
    servers: int
    members: list[MemberRecord]
    script: str | None = None
    """The user's own program with its arguments; what it trains, and on what, only it knows."""

    model: str | None = None
    data: str | None = None
    global_batch: int | None = None
    steps: int | None = None
    samples_per_second: float | None = None
    """While it trained: steps alone, pauses between them left out."""

    samples_per_second_with_pauses: float | None = None
    """Seconds from the first measured step to the last; evaluation, checkpoints and own pauses are
    included."""

    wall_seconds: dict[str, float] | None = None
    """Parts of the time from start to end, on worker 0; they sum to the whole."""

    samples_not_seen: int | None = None
    """Divided with a worker that was lost before its part of the step counted."""

    step_seconds: StepSeconds | None = None
    breakdown_seconds: dict[str, float] | None = None
    loss: Loss | None = None
    accuracy: dict[str, float] | None = None
    staleness: dict[str, float] | None = None
    epoch_seconds: float | None = None
    bytes_per_step: float | None = None
    """Sent by all members together in one step, from the first measured step on."""

    packets_per_step: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    limit_seconds: float | None = None
    verdict: str | None = None
    interval: dict[str, float] | None = None
    """Bounds of a prediction: nine of ten measurements lie between `low` and `high` samples per
    second."""

    limited_by: str | None = None
    """The resource that a predicted step needs longest."""

    notes: list[str] | None = None
    """Fallbacks taken and anything emulated, in words."""

    @property
    def subject(self) -> str:
        """Name of what was run: the script, or the model."""
        return str(self.script or self.model)
