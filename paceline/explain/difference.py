"""What differs between two experiments, and how much faster one is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from paceline import spec
from paceline.explain.facts import Facts

NOT_ASKED = {"name", "measurement"}
"""Parts of an experiment that change nothing about what is run."""


def differs(facts: Facts, baseline: Facts) -> tuple[str, ...]:
    """Every field in which the experiments differ: "servers: 2, in the baseline 1"."""
    own, other = (_flat(one) for one in (facts, baseline))
    if facts.cores != baseline.cores:
        own["cores of the machine"], other["cores of the machine"] = facts.cores, baseline.cores
    return tuple(
        f"{key}: {_shown(own.get(key))}, in the baseline {_shown(other.get(key))}"
        for key in dict.fromkeys((*own, *other))
        if own.get(key) != other.get(key)
    )


def opening(differences: tuple[str, ...]) -> str:
    """The differences in a clause; what is the same is not said."""
    if not differences:
        return "the same experiment twice"
    shown = [text.replace(", in the baseline ", " where the baseline has ") for text in differences]
    return "; ".join(shown[:3]) + (f"; and {len(shown) - 3} more" if len(shown) > 3 else "")


def speedup(facts: Facts, baseline: Facts) -> float:
    """Throughput over the baseline's, pauses included on both sides."""
    return _rate(facts) / _rate(baseline)


def efficiency(facts: Facts, baseline: Facts) -> float | None:
    """Speed-up over the ratio of workers; None where as many workers are compared."""
    own, other = len(facts.workers), len(baseline.workers)
    return speedup(facts, baseline) * other / own if own > other else None


def _rate(facts: Facts) -> float:
    return sum(w.samples / (w.step_seconds + w.paused_seconds) for w in facts.workers)


def _flat(facts: Facts) -> dict[str, Any]:
    """Fields that are not at their default, under the names users write."""
    experiment = facts.experiment
    tables = {k: v for k, v in msgspec.to_builtins(experiment).items() if k not in NOT_ASKED}
    kind = experiment.architecture
    tables["architecture"] = spec.format_architecture(kind)
    flat = dict(_leaves(tables))
    flat["workers"] = experiment.cluster.workers
    if experiment.num_servers:
        flat["servers"] = experiment.num_servers
    flat.pop("global_batch", None)
    flat.setdefault("engine", experiment.engine)
    flat["device"] = experiment.cluster.device
    workload = experiment.workload
    if workload.script is not None:  # it names its model, its data and its batch itself
        flat["samples of a worker's step"] = round(facts.typical.samples)
        return flat
    flat["batch"] = workload.global_batch_for(experiment.cluster.workers) / flat["workers"]
    for name in ("model", "data"):
        flat[name] = getattr(workload, name)
    return flat


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield key, value


def _shown(value: Any) -> str:
    """As a user would write it, without the brackets of any language."""
    match value:
        case None:
            return "none"
        case float():
            return f"{value:g}"
        case dict():
            return " ".join(f"{key}={_shown(one)}" for key, one in value.items()) or "plain"
        case list() | tuple():
            return (
                " ".join(map(_shown, value)) if _is_flat(value) else ", ".join(map(_shown, value))
            )
    return str(value)


def _is_flat(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, dict | list | tuple) for value in values)
