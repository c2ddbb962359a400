"""The search itself: ask for settings, run them, report losses, tell how trials ended.

Only this process knows the study. A trial is a process with an experiment of its own; its record
says how it does.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import product

import msgspec

from paceline import spec
from paceline.errors import PacelineError, SpecError
from paceline.record import checkpoints
from paceline.search.folder import SearchFolder, TrialEntry
from paceline.search.forecast import Forecast, forecast
from paceline.search.process import TrialProcess
from paceline.search.study import Study
from paceline.search.values import UNKNOWN_LENGTH_STEPS, WARMUP_FRACTION, Course, value_of
from paceline.spec.search import (
    MOST_CHOICES,
    SETTING,
    SearchQuestion,
    Value,
    ValueList,
    apply,
    parse_goal,
)

LOOK_SECONDS = 0.2
MOST_UNRUN = 50
"""A search ends when that many settings in a row needed no run: it has seen what there is."""

MOST_FAILURES = 3
"""A search whose first trials all fail stops: the settings are not what is wrong."""

Settings = dict[str, Value]


class SearchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a search is, for those who show it."""

    done: int
    total: int
    best: TrialEntry | None
    running: tuple[str, ...]
    """Settings of the trials that run, in words."""


Watch = Callable[[SearchProgress], None]


class _Active(msgspec.Struct):
    """A trial that runs."""

    number: int
    settings: Settings
    experiment: spec.Experiment
    process: TrialProcess
    course: Course
    predicted: Forecast | None
    pruned: str = ""
    """Why it was ended early."""


def experiment_of(question: SearchQuestion, settings: Settings) -> spec.Experiment:
    """Return the experiment of one trial, with what the goal needs.

    Servers do not apply to an architecture without servers, and are left out there.
    """
    base, search = question.experiment, question.search
    chosen = dict(settings)
    if "architecture" in chosen:
        kind = spec.parse_architecture(str(chosen["architecture"]), "--try architecture")
        if not kind.takes_servers:
            chosen.pop("servers", None)
            base = spec.replace(base, servers=0)
    made = apply(base, chosen)
    if not made.cluster.threads:
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // (made.cluster.workers * search.parallel))
        made = spec.replace(made, threads=threads)
    if parse_goal(search.goal).name == "accuracy":
        made = spec.replace(made, evaluate=True)
    return made


def num_steps(experiment: spec.Experiment) -> int | None:
    """Return how many steps a trial takes; None for a script, and where epochs are given."""
    workload = experiment.workload
    if workload.script is not None or workload.epochs:
        return None
    return workload.num_steps(experiment.cluster.workers, 0)


def settings_in_words(settings: Settings) -> str:
    """Return settings as a person reads them: "learning_rate 0.0312, batch 64"."""
    shown = [
        f"{name.removeprefix(SETTING)} {value:.4g}"
        if isinstance(value, float)
        else f"{name.removeprefix(SETTING)} {value}"
        for name, value in settings.items()
    ]
    return ", ".join(shown)


def first_experiment(question: SearchQuestion) -> spec.Experiment:
    """Return the first experiment that a trial could run; SpecError where there is none."""
    search, goal = question.search, parse_goal(question.search.goal)
    if goal.name == "accuracy" and question.experiment.workload.script is not None:
        problem = "a script reports no accuracy."
        raise SpecError("--goal", problem, "use --goal loss, or time:loss=0.5.")
    first: SpecError | None = None
    for settings in _corners(question):
        try:
            return experiment_of(question, settings)
        except SpecError as error:
            first = first or error
    if first is not None:
        raise first
    raise SpecError("search", "there is nothing to try.", f"got {search.tried}.")


def _corners(question: SearchQuestion) -> Iterator[Settings]:
    """All combinations of listed values; a range is represented by its ends."""
    dimensions = question.search.dimensions()
    values = [
        d.values if isinstance(d, ValueList) else (d.low, d.high) for d in dimensions.values()
    ]
    for combination in product(*values):
        yield dict(zip(dimensions, combination, strict=True))


class Searching:
    """One search, from its folder to its best trial."""

    def __init__(self, folder: SearchFolder, watch: Watch) -> None:
        self._folder, self._watch = folder, watch
        self._question = folder.question()
        self._search, self._goal = self._question.search, parse_goal(self._question.search.goal)
        length = num_steps(self._question.experiment) or UNKNOWN_LENGTH_STEPS
        self._study = Study(folder, math.ceil(length * WARMUP_FRACTION))
        self._entries = folder.entries()
        self._active: list[_Active] = []
        self._is_known_to_the_end = False
        """All settings there are have been enqueued."""

    def run(self) -> list[TrialEntry]:
        """Run trials until all are done; return every trial's end."""
        self._study.take_back_interrupted()
        if self._is_grid and not self._entries and not self._study.num_enqueued:
            self._enqueue_grid()
        try:
            while self._fill() or self._active:
                self._look()
                time.sleep(LOOK_SECONDS)
        finally:
            for active in self._active:
                active.process.ask_to_end()
            for active in self._active:
                active.process.end()
        self._folder.write_best()
        return self._entries

    def importances(self) -> dict[str, float]:
        """Return the share of each setting in how values differ."""
        return self._study.importances()

    @property
    def _is_grid(self) -> bool:
        """Return whether every combination is listed beforehand."""
        dimensions = self._search.dimensions().values()
        listed = [len(d.values) for d in dimensions if isinstance(d, ValueList)]
        if len(listed) < len(dimensions):
            return False
        few = math.prod(listed) <= self._search.trials  # a sampler would draw some again and again
        return self._search.sampler == "grid" or self._looks_ahead or few

    @property
    def _looks_ahead(self) -> bool:
        """Return whether predictions leave out what cannot win."""
        return self._goal.is_speed and self._search.predict and not self._is_prediction

    @property
    def _is_prediction(self) -> bool:
        return self._question.experiment.engine == "predict"

    @property
    def _num_started(self) -> int:
        return sum(entry.was_run for entry in self._entries) + len(self._active)

    def _enqueue_grid(self) -> None:
        """Enqueue every combination; where predictions look ahead, the most promising first."""
        combinations = list(_corners(self._question))
        if len(combinations) > MOST_CHOICES:
            problem = f"{len(combinations)} combinations are more than {MOST_CHOICES}."
            raise SpecError("--try", problem, "list fewer values.")
        if self._looks_ahead:
            combinations.sort(key=self._promise)
        for settings in combinations:
            self._study.enqueue(settings)

    def _promise(self, settings: Settings) -> float:
        """Return the key that sorts settings, the most promising first."""
        try:
            found = forecast(experiment_of(self._question, settings), self._goal, self._search)
        except SpecError:
            return math.inf
        if isinstance(found, str):
            return -math.inf  # nothing is known of it: it has to be run
        return -found.middle if self._goal.maximizes else found.middle

    def _fill(self) -> bool:
        """Start trials while there is room; return whether more may come."""
        while self._num_started < self._search.trials:
            if len(self._active) >= self._search.parallel:
                return True
            if self._is_grid and not self._study.num_enqueued:
                return False
            if len(self._entries) >= MOST_UNRUN and not any(
                entry.was_run for entry in self._entries[-MOST_UNRUN:]
            ):
                return bool(self._active)
            self._start()
        return False

    def _start(self) -> None:
        number, settings, again = self._study.ask(len(self._entries) + len(self._active))
        try:
            experiment = experiment_of(self._question, settings)
        except SpecError as error:
            self._end_unrun(number, settings, "left out", f"{error.where}: {error.problem}")
            return
        if (same := self._same_as(experiment)) is not None:
            reason = f"the same experiment as trial {same.number}"
            self._end_unrun(number, settings, "same", reason, value=same.value)
            return
        predicted = None
        if self._looks_ahead:
            found = forecast(experiment, self._goal, self._search)
            predicted = found if isinstance(found, Forecast) else None
            if predicted is not None and (winner := self._winner_over(predicted)) is not None:
                reason = f"predicted to be worse than trial {winner.number}"
                self._end_unrun(number, settings, "left out", reason, predicted=predicted)
                return
        if again is not None:
            experiment = self._continued(experiment, again)
        self._active.append(
            _Active(
                number=number,
                settings=settings,
                experiment=experiment,
                process=TrialProcess(self._folder.trial_path(number), experiment),
                course=Course(num_steps(experiment)),
                predicted=predicted,
            )
        )
        self._show()

    def _winner_over(self, predicted: Forecast) -> TrialEntry | None:
        """Return the best trial so far, if a setting predicted like this cannot reach it."""
        best = self._folder.best(self._entries)
        if (
            best is None
            or best.value is None
            or not predicted.is_worse_than(best.value, self._goal)
        ):
            return None
        return best

    def _same_as(self, experiment: spec.Experiment) -> TrialEntry | None:
        """Return the finished trial of the very same experiment, if there is one."""
        for entry in self._entries:
            if entry.state != "complete":
                continue
            if experiment_of(self._question, entry.settings) == experiment:
                return entry
        return None

    def _continued(self, experiment: spec.Experiment, again: int) -> spec.Experiment:
        """Continue the experiment from the interrupted trial's checkpoint if it has one."""
        run = self._folder.trial_path(again) / "run"
        if experiment.workload.script is not None or not checkpoints.exist(run):
            return experiment
        return spec.replace(experiment, resume=str(run.absolute()))

    def _look(self) -> None:
        """Report what trials have done; end those that fall behind, and those that have ended."""
        for active in list(self._active):
            status = active.process.status
            if not active.pruned and not self._goal.is_speed:
                self._report(active)
            if status is not None:
                self._active.remove(active)
                self._end(active, status)
                self._show()

    def _report(self, active: _Active) -> None:
        for step, loss in active.course.new_reports(active.process.losses()):
            if not math.isfinite(loss):
                active.pruned = f"the loss was not a number by step {step}"
            elif self._study.report(active.number, step, loss):
                active.pruned = f"behind the other trials at step {step}"
            if active.pruned:
                active.process.ask_to_end()
                return

    def _end(self, active: _Active, status: int) -> None:
        """Note how a process ended."""
        process, value, reason = active.process, None, active.pruned
        state = "pruned" if reason else "complete"
        if not reason and status != 0:
            state, reason = "failed", process.last_line()
        elif not reason:
            value, reason = value_of(process.folder, self._goal, self._search)
            state = "complete" if value is not None else "pruned"
        self._add(
            TrialEntry(
                number=active.number,
                settings=active.settings,
                state=state,
                value=value,
                seconds=round(process.seconds, 3),
                steps=max(process.losses(), default=-1) + 1,
                run=str(process.folder.path.relative_to(self._folder.path)),
                reason=reason,
                predicted=_as_dict(active.predicted),
            )
        )
        if state == "failed":
            self._stop_if_hopeless(reason)
        elif unasked := process.unasked_settings():
            problem = f"the code of the trials never asked for {', '.join(unasked)}."
            fix = "ask with paceline.setting(NAME, default), or leave it out."
            raise SpecError("--try", problem, fix)

    def _end_unrun(
        self,
        number: int,
        settings: Settings,
        state: str,
        reason: str,
        value: float | None = None,
        predicted: Forecast | None = None,
    ) -> None:
        """Note a trial for which no process was started."""
        entry = TrialEntry(
            number=number,
            settings=settings,
            state=state,
            value=value,
            reason=reason,
            predicted=_as_dict(predicted),
        )
        self._add(entry)

    def _add(self, entry: TrialEntry) -> None:
        self._study.tell(entry.number, entry.value, pruned=entry.state in ("pruned", "left out"))
        self._folder.add(entry)
        self._entries.append(entry)

    def _stop_if_hopeless(self, reason: str) -> None:
        ran = [entry for entry in self._entries if entry.was_run]
        if len(ran) >= MOST_FAILURES and all(entry.state == "failed" for entry in ran):
            raise PacelineError(f"the first {len(ran)} trials all failed; the last said: {reason}")

    def _show(self) -> None:
        self._watch(
            SearchProgress(
                done=sum(entry.was_run for entry in self._entries),
                total=self._search.trials,
                best=self._folder.best(self._entries),
                running=tuple(settings_in_words(active.settings) for active in self._active),
            )
        )


def _as_dict(found: Forecast | None) -> dict[str, float] | None:
    return None if found is None else msgspec.structs.asdict(found)
