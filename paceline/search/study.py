"""Optuna's study, owned by the launcher alone: workers never see it.

Each suggestion is drawn with a seed of its own, made from the search's seed and the number of the
trial. So a search repeats exactly from its file, and continues after a kill as if undisturbed.
"""

import contextlib
import io
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingError
from paceline.search.folder import SearchFolder
from paceline.spec.search import Dimension, Search, Value, ValueList, parse_goal

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

AGAIN = "again"
"""Attribute of a trial: the number of the interrupted one that it repeats."""

SCORED = ("COMPLETE", "PRUNED")


class Study:
    """Ask for settings, report losses, tell how trials ended."""

    def __init__(self, folder: SearchFolder, warmup_steps: int) -> None:
        optuna = import_optuna()
        search = folder.question().search
        self._search, self._goal = search, parse_goal(search.goal)
        self._distributions = {n: _distribution(d) for n, d in search.dimensions().items()}
        backend = optuna.storages.journal.JournalFileBackend(str(folder.journal))
        self._study = optuna.create_study(
            study_name="search",
            storage=optuna.storages.JournalStorage(backend),
            direction="maximize" if self._goal.maximizes else "minimize",
            pruner=_pruner(search, warmup_steps),
            load_if_exists=True,
        )
        self._running: dict[int, Any] = {}

    def take_back_interrupted(self) -> list[int]:
        """Repeat the trials that were running when the search was killed; return their numbers.

        Optuna would leave them running for ever: its heartbeats do not work with ask and tell.
        """
        import optuna

        running = [t for t in self._study.trials if t.state == optuna.trial.TrialState.RUNNING]
        for trial in running:
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            self.enqueue(trial.params, again=trial.number)
        return [trial.number for trial in running]

    def enqueue(self, settings: dict[str, Value], again: int | None = None) -> None:
        """Have these settings come next, behind those that were enqueued before."""
        attributes = None if again is None else {AGAIN: again}
        self._study.enqueue_trial(settings, user_attrs=attributes)

    @property
    def num_enqueued(self) -> int:
        """Return how many settings wait for their turn."""
        import optuna

        return len(self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.WAITING]))

    def ask(self, index: int) -> tuple[int, dict[str, Value], int | None]:
        """Return the next trial's number, its settings and the trial that it repeats.

        `index`: how many trials of this search came before, interrupted ones not counted.
        """
        self._study.sampler = _sampler(self._search, index)
        trial = self._study.ask(self._distributions)
        self._running[trial.number] = trial
        settings = {name: trial.params[name] for name in self._distributions}
        return trial.number, settings, trial.user_attrs.get(AGAIN)

    def report(self, number: int, step: int, loss: float) -> bool:
        """Report the loss at a step; return whether the trial should end early.

        Where a larger value wins, the pruner is shown the loss with its sign turned.
        """
        trial = self._running[number]
        trial.report(-loss if self._goal.maximizes else loss, step)
        return bool(trial.should_prune())

    def tell(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Say how a trial ended: with a value, early, or without either."""
        import optuna

        states = optuna.trial.TrialState
        state = states.PRUNED if pruned else states.FAIL if value is None else states.COMPLETE
        self._running.pop(number, None)
        self._study.tell(number, None if pruned or value is None else value, state=state)

    def importances(self) -> dict[str, float]:
        """Return the share of each setting in how values differ; empty when too few are known."""
        import optuna

        if len(self._distributions) < 2:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        with contextlib.suppress(ValueError, RuntimeError):
            found = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
            return {name: float(share) for name, share in found.items()}
        return {}


def import_optuna() -> Any:
    """Return the library, quiet; MissingError where it is not installed."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            import optuna
    except ImportError as error:
        problem = "a search needs the package optuna, which is not installed."
        raise MissingError(problem, "pip install optuna.") from error
    import warnings

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def _distribution(dimension: Dimension) -> "BaseDistribution":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(dimension, ValueList):
        return CategoricalDistribution(dimension.values)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _sampler(search: Search, index: int) -> "optuna.samplers.BaseSampler":
    """Return the sampler of one trial; a grid is enqueued, and asks no sampler."""
    from optuna.samplers import RandomSampler, TPESampler

    seed = (search.seed * 1_000_003 + index) % 2**32
    if search.sampler != "tpe":
        return RandomSampler(seed=seed)
    at_random = max(4, search.trials // 4)
    return TPESampler(
        seed=seed,
        n_startup_trials=at_random,
        multivariate=len(search.tried) > 1,
        constant_liar=search.parallel > 1,
    )


def _pruner(search: Search, warmup_steps: int) -> "optuna.pruners.BasePruner":
    """Return the pruner; `warmup_steps`: the median ends no trial before that step."""
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner

    if search.pruner == "median":
        early = max(3, search.trials // 5)
        return MedianPruner(n_startup_trials=early, n_warmup_steps=warmup_steps)
    if search.pruner == "asha":
        return SuccessiveHalvingPruner()
    if search.pruner == "hyperband":
        return HyperbandPruner()
    return NopPruner()
