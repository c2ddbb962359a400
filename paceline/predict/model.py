"""The model of an architecture's step: what `predicted_by` of its structure names."""

from collections.abc import Callable
from importlib import import_module

import msgspec

from paceline import spec
from paceline.errors import SpecError
from paceline.predict.outcome import Outcome

COLLECTIVES_ONLY = frozenset(
    {
        "cycle_seconds",
        "launch_seconds",
        "negotiation_seconds",
        "hop_seconds",
        "contention_fraction",
    }
)
SERVERS_ONLY = frozenset({"message_seconds", "sum_rate"})


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """How one architecture's step is predicted."""

    step: Callable[..., Outcome]
    """Called as `step(experiment, topology, stack, constants, coarse=…, timeline=…)`; it returns
    one step of a typical worker."""

    ignored: frozenset[str] = frozenset()
    """Constants of `stacks.Constants` that change nothing here. Each other one is tried at both
    ends of its range, for the interval."""


def model_of(kind: spec.Architecture) -> Model:
    """The model that the architecture names; SpecError where it names none."""
    name = spec.architecture_name(kind)
    if not kind.predicted_by:
        known = [n for n, other in spec.ARCHITECTURES.items() if other.predicted_by]
        fix = f"choose {', '.join(known[:-1])} or {known[-1]}."
        raise SpecError("--architecture", f"{name} cannot be predicted yet.", fix)
    module, _, attribute = kind.predicted_by.partition(":")
    model = getattr(import_module(module), attribute)
    if not isinstance(model, Model):
        problem = f"predicted_by of {name} names {kind.predicted_by}, which is not a Model."
        raise SpecError("--architecture", problem, "see docs/adding-an-architecture.md.")
    return model
