"""`python -m tests.simulation --seeds 0:1000`: simulate seeds; a failing one is shrunk and shown.

`make simulate` draws 20,000 from a random seed on, `make simulate SEEDS=0:1000000` what it says.
`--replay JSON` runs one schedule again. With `--views` the seeds are of jobs without servers, which
change their views.
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback

import msgspec

from tests.simulation.job import simulate
from tests.simulation.schedule import Schedule, draw, shrink
from tests.simulation.search import collect_rarely, fails, timed, timed_views

PORTION = 500


def show(schedule: Schedule) -> None:
    try:
        simulate(schedule)
    except Exception:
        traceback.print_exc()
    print(msgspec.json.encode(schedule).decode())


def seeds_of(text: str) -> range:
    """Read FROM:TO, or N: that many from a random seed on."""
    first, colon, last = text.partition(":")
    if colon:
        return range(int(first), int(last))
    start = random.randrange(10**9)
    return range(start, start + int(first))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds",
        default="0:1000",
        help="FROM:TO, the last not included; or N, from a random seed on",
    )
    parser.add_argument("--replay", help="a schedule as JSON")
    parser.add_argument("--views", action="store_true", help="jobs without servers")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    if asked.replay:
        show(msgspec.json.decode(asked.replay, type=Schedule))
        return 0
    seeds, began = seeds_of(asked.seeds), time.monotonic()
    print(f"seeds {seeds.start}:{seeds.stop}", file=sys.stderr)
    found: list[int] = []
    core_seconds = 0.0
    run = timed_views if asked.views else timed
    portions = [seeds[at : at + PORTION] for at in range(0, len(seeds), PORTION)]
    with multiprocessing.get_context("spawn").Pool(asked.jobs, collect_rarely) as pool:
        for done, (failed, seconds) in enumerate(pool.imap_unordered(run, portions), 1):
            core_seconds += seconds
            found += failed
            for seed in failed:
                print(f"seed {seed} fails", file=sys.stderr)
            if done % 20 == 0 or done == len(portions):
                left = (time.monotonic() - began) / done * (len(portions) - done)
                text = f"{min(done * PORTION, len(seeds))} of {len(seeds)} schedules"
                text = f"{text}, {len(found)} failed, {core_seconds:.0f} core-seconds"
                print(f"{text}, {left:.0f} s left", file=sys.stderr, flush=True)
    text = f"{len(seeds)} schedules in {time.monotonic() - began:.0f} s on {asked.jobs} cores"
    each = 1000 * core_seconds / max(1, len(seeds))
    print(f"{text}, {each:.2f} core-ms each: {len(found)} failed")
    for seed in () if asked.views else sorted(found)[:3]:
        print(f"seed {seed}, shrunk:")
        show(shrink(draw(seed), fails))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
