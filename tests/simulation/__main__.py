"""`python -m tests.simulation --seeds 0:1000`: simulate seeds; a failing one is shrunk and shown.

`make simulate SEEDS=0:1000000` is the long form. `--replay JSON` runs one schedule again.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback

import msgspec

from tests.simulation.job import simulate
from tests.simulation.schedule import Schedule, draw, shrink
from tests.simulation.search import failing, fails

PORTION = 500


def show(schedule: Schedule) -> None:
    try:
        simulate(schedule)
    except Exception:
        traceback.print_exc()
    print(msgspec.json.encode(schedule).decode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="from:to, the last not included")
    parser.add_argument("--replay", help="a schedule as JSON")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    if asked.replay:
        show(msgspec.json.decode(asked.replay, type=Schedule))
        return 0
    first, _, last = asked.seeds.partition(":")
    seeds, began, found = range(int(first), int(last)), time.monotonic(), []
    portions = [seeds[at : at + PORTION] for at in range(0, len(seeds), PORTION)]
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for done, failed in enumerate(pool.imap_unordered(failing, portions), 1):
            found += failed
            for seed in failed:
                print(f"seed {seed} fails", file=sys.stderr)
            if done % 20 == 0 or done == len(portions):
                seconds = time.monotonic() - began
                left = seconds / done * (len(portions) - done)
                text = f"{min(done * PORTION, len(seeds))} of {len(seeds)} schedules"
                print(f"{text}, {len(found)} failed, {left:.0f} s left", file=sys.stderr)
    seconds = time.monotonic() - began
    print(f"{len(seeds)} schedules in {seconds:.0f} s on {asked.jobs} cores: {len(found)} failed")
    for seed in sorted(found)[:3]:
        print(f"seed {seed}, shrunk:")
        show(shrink(draw(seed), fails))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
