"""What is asked for when a worker is lost, and whether it can be had."""

from paceline import spec
from paceline.errors import SpecError

WHERE = "--on-loss"


def check_on_loss(experiment: spec.Experiment) -> None:
    """Raise SpecError where `continue` is asked for and nobody could."""
    cluster, kind = experiment.cluster, experiment.architecture
    if not cluster.goes_on:
        return
    if cluster.workers == 1:
        problem = "there is one worker, and nobody to go on without it."
        raise SpecError(WHERE, problem, "write stop, and --restarts to start again.")
    check_survives(kind)
    if cluster.launcher == "ray":
        problem = "members that Ray starts end together."
        raise SpecError(WHERE, problem, "leave --launcher out, or write stop.")


def check_survives(kind: spec.Architecture) -> None:
    """Raise SpecError for an architecture whose workers need each other."""
    if not kind.survives:
        name = spec.format_architecture(kind)
        problem = f"the workers of {name} cannot go on without one of them."
        raise SpecError(WHERE, problem, "write stop, and --restarts to start again.")
