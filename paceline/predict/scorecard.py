"""Every prediction that was later measured, kept beside the user's runs."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from paceline import spec
from paceline.errors import SpecError
from paceline.predict.answer import predict
from paceline.record import RunFolder

FILE = "scorecard.jsonl"


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One prediction beside its measurement, in samples per second."""

    time: str
    name: str
    architecture: str
    workers: int
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error_fraction(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def score(run: RunFolder) -> Score:
    """Predict the experiment of a measured run, and lay both side by side."""
    experiment, summary = run.experiment(), run.summary()
    measured = summary.samples_per_second
    if experiment.engine == "predict" or measured is None:
        problem = "it was not measured: there is nothing to compare with."
        raise SpecError(str(run.path), problem, "name a run of `here` or `tunnel` that finished.")
    found = predict(spec.replace(experiment, engine="predict"))
    return Score(
        time=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        name=experiment.name or run.path.name,
        architecture=summary.architecture,
        workers=summary.workers,
        predicted=found.samples_per_second,
        low=found.low,
        high=found.high,
        measured=measured,
    )


def keep(entry: Score, runs: Path) -> None:
    """Add a line to the scorecard."""
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / FILE).open("ab") as file:
        file.write(msgspec.json.encode(entry) + b"\n")


def read(runs: Path) -> list[Score]:
    """All that was kept; empty where nothing was."""
    path = runs / FILE
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Score)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line]
