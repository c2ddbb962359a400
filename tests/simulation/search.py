"""Which seeds fail. In a file of its own, so that other processes find it by name."""

import gc
import time

from tests.simulation import views
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


def timed(seeds: range) -> tuple[list[int], float]:
    """Those that fail, and the core-seconds that it took."""
    began = time.process_time()
    return failing(seeds), time.process_time() - began


def timed_views(seeds: range) -> tuple[list[int], float]:
    """The same of jobs that change their views."""
    began = time.process_time()
    return list(views.failing(seeds)), time.process_time() - began


def collect_rarely() -> None:
    """A job is a ring of objects, and short: looking for rings often took a sixth of the time."""
    gc.freeze()
    gc.set_threshold(100_000)
