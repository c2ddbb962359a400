"""Which seeds fail. In a file of its own, so that other processes find it by name."""

from tests.simulation.job import simulate
from tests.simulation.schedule import Schedule, draw


def fails(schedule: Schedule) -> bool:
    """Any error: machines raise none of their own in a job whose members do as they should."""
    try:
        simulate(schedule)
    except Exception:
        return True
    return False


def failing(seeds: range) -> list[int]:
    return [seed for seed in seeds if fails(draw(seed))]
