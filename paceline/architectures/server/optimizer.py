"""The worker's optimizer when updates happen on servers: same object, same groups, new `step`.

Schedulers and scripts hold on to the optimizer they made, so it is not replaced: it changes class.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Remote(Optimizer):
    """Mixed into the optimizer's own class; asks its owner in place of updating by itself."""

    _on_step: Callable[[], None]
    _on_state_wanted: Callable[[], None]
    _on_state_given: Callable[[], None]

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # schedulers ask whether a step came before theirs
        self._on_step()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        self._on_state_wanted()
        state = super().state_dict()
        self.state.clear()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._on_state_given()
        self.state.clear()


def make_remote(
    optimizer: Optimizer,
    *,
    on_step: Callable[[], None],
    on_state_wanted: Callable[[], None],
    on_state_given: Callable[[], None],
) -> Callable[[], None]:
    """Change the optimizer's class; returns what changes it back.

    `on_state_wanted` fills `optimizer.state` before it is saved, `on_state_given` takes it away
    after it was loaded.
    """
    kind = type(optimizer)
    remote: Any = optimizer
    remote.__class__ = type(kind.__name__, (Remote, kind), {"step": Remote.step})
    remote._on_step = on_step
    remote._on_state_wanted, remote._on_state_given = on_state_wanted, on_state_given
    vars(optimizer).pop("step", None)  # a scheduler made earlier has wrapped the old one
    remote._patch_step_function()

    def restore() -> None:
        remote.__class__ = kind

    return restore
