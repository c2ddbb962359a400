"""The worker's optimizer when updates happen on servers: same object, same groups, new `step`.

Schedulers and scripts hold on to the optimizer they made, so it is not replaced: it changes class.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from paceline.architectures.mixing import mix_in


class Owner(Protocol):
    """Who updates in the optimizer's place."""

    def step(self) -> bool:
        """All gradients of a step are made. False: the optimizer has been taken back, and must
        update by itself."""

    def saved_state(self) -> dict[str, Any]:
        """What the optimizer's own `state_dict` would give."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a saved state."""

    def touch_state(self) -> None:
        """The script looks at `optimizer.state` itself: it must be there when this returns."""


class Remote(Optimizer):
    """Mixed into the optimizer's own class; asks its owner in place of updating by itself."""

    _paceline_owner: Owner

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # schedulers ask whether a step came before theirs
        if not type(self)._paceline_owner.step():
            type(self).step(self)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return type(self)._paceline_owner.saved_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        type(self)._paceline_owner.load_state(state_dict)

    @property
    def state(self) -> Any:
        type(self)._paceline_owner.touch_state()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        type(self)._paceline_owner.touch_state()
        vars(self)["state"] = value


def make_remote(optimizer: Optimizer, owner: Owner) -> Callable[[], None]:
    """Change the optimizer's class; returns what changes it back."""
    wrapped = vars(optimizer).pop("step", None)  # by a scheduler that was made before
    undo = mix_in(optimizer, Remote, _paceline_owner=owner, step=Remote.step)
    remote: Any = optimizer
    remote._patch_step_function()

    def restore() -> None:
        undo()
        if wrapped is not None:
            remote.step = wrapped

    return restore
