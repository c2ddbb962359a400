"""What `fit` does once for all workers: metrics agreed on, files written by one, learning rates."""

from collections.abc import Sequence
from typing import Any

import keras

from paceline.errors import SpecError
from paceline.session.session import Session
from paceline.session.start import current
from paceline.telemetry import EVALUATION
from paceline.telemetry.clock import OTHER

WRITING = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
"""Callbacks that do nothing but write files: worker 0's do."""


class Agreement(keras.callbacks.Callback):  # type: ignore[misc]
    """First of all callbacks: those after it see one model, and metrics of all samples.

    So that early stopping, plateaus and the best checkpoint are decided alike on every worker.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = owner
        self._is_training = False
        self._trained: dict[str, float] | None = None
        self._validated: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self._is_training = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """The next thing that `fit` does is to ask for data."""
        self._owner.session.clock.enter("input")

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation follows, and will overwrite the metrics of training."""
        if self._is_training:
            self._owner.session.clock.enter(EVALUATION)
            self._trained = self._owner.metrics()
            self._owner.settle()

    def on_test_end(self, logs: Any = None) -> None:
        if self._is_training:
            results = self._owner.metrics()
            self._validated = {f"val_{name}": value for name, value in results.items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        clock = self._owner.session.clock
        clock.enter(EVALUATION)
        if self._trained is None:
            self._trained = self._owner.metrics()
            self._owner.settle()
        self._owner.check_weights()
        agreed = {**self._trained, **self._validated}
        self._trained, self._validated = None, {}
        logs = {} if logs is None else logs
        logs.update({name: value for name, value in agreed.items() if name in logs})
        rest = sorted(name for name in logs if name not in agreed)
        if rest:
            logs.update(self._owner.mean_logs(rest, logs))
        clock.enter(OTHER)  # what other callbacks do is the script's


class LearningRateWarmUp(keras.callbacks.Callback):  # type: ignore[misc]
    """Raise the learning rate from the script's own to that times the workers, over some epochs.

    For batches that grow with the workers; it goes on at the larger rate.
    """

    def __init__(self, epochs: int = 5, factor: float | None = None) -> None:
        """`factor`: how many times the script's rate; as many as there are workers if left out."""
        super().__init__()
        self._epochs, self._factor = epochs, factor
        self._first = self._epoch = 0.0
        self._is_over = False

    def on_train_begin(self, logs: Any = None) -> None:
        rate = getattr(self.model.optimizer, "_learning_rate", None)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            problem = "the optimizer's learning rate is a schedule, which cannot be changed."
            fix = "give the schedule a warm-up of its own, or the optimizer a number."
            raise SpecError("LearningRateWarmUp", problem, fix)
        if self._factor is None:
            self._factor = float(current().workers)
        self._first = float(self.model.optimizer.learning_rate)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = float(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._is_over:
            return
        assert self._factor is not None
        steps = (self.params or {}).get("steps")
        passed = self._epoch + (batch / steps if steps else 0.0)
        share = min(passed / self._epochs, 1.0) if self._epochs else 1.0
        self.model.optimizer.learning_rate = self._first * (1 + share * (self._factor - 1))
        self._is_over = share == 1.0  # from here on the rate is the script's to change


def for_this_worker(first: Any, given: Any, session: Session) -> Any:
    """The callbacks of `fit` on this worker, `first` in front."""
    if isinstance(given, keras.callbacks.CallbackList):
        given.callbacks.insert(0, first)
        first.set_model(given._model)
        return given
    listed: Sequence[Any] = given if isinstance(given, list | tuple) else [given] if given else []
    if session.workers > 1 and any(isinstance(c, keras.callbacks.BackupAndRestore) for c in listed):
        problem = (
            "BackupAndRestore restores weights inside fit, and all workers would write one file."
        )
        fix = "use ModelCheckpoint, and load on every worker before distribute."
        raise SpecError("fit", problem, fix)
    kept = [c for c in listed if session.participants.is_speaker or not isinstance(c, WRITING)]
    return [first, *kept]
