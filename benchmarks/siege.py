"""A job among strangers: whatever they send to its ports, does it train on as without them?

    python benchmarks/siege.py --messages 100000 --json
    python benchmarks/siege.py --only encrypted --messages 5000

Each kind of job trains while strangers (`strangers.py`) send so many malformed messages to every
port that it has: the store, servers on TCP (encrypted or not) and Unix sockets, gloo's, the page.
Checked: no member ends, none grows in memory, files or threads, training goes on, losses and
weights are bit for bit those of the same job alone, and who does not know the key gets in nowhere.
"""

import argparse
import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import strangers
from besieged import GROWTH_FILES, JOBS, Job, undisturbed
from strangers import Port, Stranger

from paceline.errors import ExchangeError
from paceline.protocol.messages import Answer, Push
from paceline.wire import JobKey, Mailbox, Packet, StoreClient

STRANGERS = 4
GROWTH_BYTES = 30 << 20


def asked(about: str | None, names: Collection[str]) -> argparse.Namespace:
    """What the command line wants of a siege of these."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--messages", type=int, default=100_000, help="to each port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(names), choices=names)
    parser.add_argument("--ports", nargs="+", help="these only, to part a long siege")
    return parser.parse_args()


def main() -> None:
    given = asked(__doc__, JOBS)
    rows = [row for name in given.only for row in _besieged(name, given)]
    result = {"rows": rows, "checks": [check for row in rows for check in checks(row)]}
    if given.json:
        print(json.dumps(result))
        return
    for row in rows:
        print(json.dumps(row, indent=1))
    for check in result["checks"]:
        print(f"{'holds' if check['holds'] else 'FAILS'}  {check['name']}: {check['value']}")


def _besieged(name: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        print(f"{name}: {given.messages} messages to each port", file=sys.stderr, flush=True)
        yield besiege(name, Path(folder), given.messages, given.seed, given.ports)


def besiege(
    name: str, folder: Path, messages: int, seed: int = 0, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """One kind of job among strangers, and then alone; what was seen of it."""
    began = time.monotonic()
    job = Job(JOBS[name], folder / "besieged")
    try:
        with job.page() as page:
            ports = [port for port in job.ports(page) if only is None or port.name in only]
            at_rest = job.use(page)
            got_in = [told for attempt in INTRUSIONS for told in attempt(ports, job.pids())]
            pace = job.pace()
            sent, failed = attack(ports, max(1, messages // 10), seed)
            before = job.quiet(page, at_rest["files"])
            besieging = time.monotonic()
            more, came_to_nothing = attack(ports, messages - messages // 10, seed + 1000)
            besieging = time.monotonic() - besieging
            after = job.quiet(page, before["files"], before["threads"])
            page_lives = page is None or page.poll() is None
            pace_after = job.pace()
    finally:
        results = job.finish()
    alone = undisturbed(JOBS[name], folder / "alone", results[0]["steps"])
    row = {
        "name": name,
        "messages": dict(sorted((sent + more).items())),
        "calls_that_came_to_nothing": dict(sorted((failed + came_to_nothing).items())),
        "ports_missing": sorted(set(only or JOBS[name].ports) - {port.name for port in ports}),
        "messages_per_second": sum(more.values()) / besieging,
        "steps": results[0]["steps"],
        "longest_step_seconds": max(result["longest_seconds"] for result in results),
        "steps_per_second_before_and_after": [pace, pace_after],
        "same": all(_training(a) == _training(b) for a, b in zip(results, alone, strict=True)),
        "finite": all(result["finite"] for result in results),
        "got_in": got_in,
        "page_lives": page_lives,
        "seconds": time.monotonic() - began,
    }
    return {**row, **{f"{what}_grew": after[what] - before[what] for what in before}}


def checks(row: dict[str, Any]) -> list[dict[str, Any]]:
    def check(name: str, value: object, holds: bool) -> dict[str, Any]:
        return {"name": f"{row['name']}: {name}", "value": value, "target": True, "holds": holds}

    return [
        check("every port besieged", row["ports_missing"], not row["ports_missing"]),
        check("same losses and weights as alone", row["same"], row["same"] and row["finite"]),
        check("nobody got in", row["got_in"], not row["got_in"]),
        check("bytes grown", row["bytes_grew"], row["bytes_grew"] < GROWTH_BYTES),
        check("files grown", row["files_grew"], row["files_grew"] <= GROWTH_FILES),
        check("threads grown", row["threads_grew"], row["threads_grew"] <= 0),
        check("the page is there", row["page_lives"], row["page_lives"]),
    ]


def _training(result: dict[str, Any]) -> tuple[object, ...]:
    return result["losses"], result["weights"]


def attack(ports: Sequence[Port], messages: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Several strangers at once; messages that arrived, calls that came to nothing, by port."""
    several = [Stranger(ports, seed + number) for number in range(STRANGERS)]
    threads = [
        threading.Thread(target=stranger.attack, args=(-(-messages // STRANGERS),))
        for stranger in several
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent, failed = Counter[str](), Counter[str]()
    for stranger in several:
        sent += stranger.sent
        failed += stranger.failed
    return sent, failed


# Those who want in. Each returns in words how it got in; nothing where it did not.

GUESSED = JobKey("not the job's")
PUSH = Push(worker=0, chunk=0, step=1, version=1)


def by_the_store(ports: Sequence[Port], pids: dict[str, int]) -> Iterator[str]:
    """A member's own code with another key."""
    for port in (port for port in ports if port.name == "store"):
        host, number = port.address
        try:
            StoreClient(str(host), int(number), GUESSED, "worker1", 5.0).close()
        except ExchangeError:
            continue
        yield f"{port.name} let in a client with another key"


def by_pushing(ports: Sequence[Port], pids: dict[str, int]) -> Iterator[str]:
    """A worker that pushes infinite gradients, and asks for weights."""
    for port in ports:
        if port.name == "store" or port.speaks != "hello":
            continue
        for encrypted in (False, True):
            mailbox = Mailbox[Push | Answer]("worker0", Push | Answer, GUESSED, encrypted=encrypted)
            address = port.address
            endpoint = f"@{address}" if isinstance(address, str) else "{}:{}".format(*address)
            mailbox.connect(port.name, endpoint)
            infinite = [struct.pack("<f", float("inf")) * 1000]
            mailbox.send(Packet(port.name, [PUSH], infinite, for_server=True))
            end = time.monotonic() + 2.0
            with contextlib.suppress(ExchangeError):
                while time.monotonic() < end:
                    if mailbox.receive(0.1):
                        yield f"{port.name} answered a push with another key"
            mailbox.abandon()


def by_the_page(ports: Sequence[Port], pids: dict[str, int]) -> Iterator[str]:
    for port in (port for port in ports if port.name == "page"):
        for path in ("/", "/events", "/?token=", "/events?token=%00"):
            with strangers.call(port.address) as line:
                line.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                answer = line.recv(65536).decode(errors="replace")
            if " 403 " not in answer.partition("\r\n")[0]:
                yield f"the page answered {path} without its token"


def by_another_user(ports: Sequence[Port], pids: dict[str, int]) -> Iterator[str]:
    """A process of this host's, of somebody else's; only root can try."""
    if os.geteuid() != 0:
        return
    sockets = [port.address for port in ports if isinstance(port.address, str)]
    asked = json.dumps({"sockets": sockets, "pids": list(pids.values())})
    command = [sys.executable, "-c", _AS_NOBODY, asked]
    yield from subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()


_AS_NOBODY = """
import json, os, socket, sys
asked = json.loads(sys.argv[1])
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in asked["sockets"]:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(2)
        try:
            line.connect("\\0" + name)
            if line.recv(100):
                print("a Unix socket answered another user")
        except OSError:
            pass
for pid in asked["pids"]:
    for what in ("mem", "environ", "fd"):
        try:
            os.listdir(f"/proc/{pid}/fd") if what == "fd" else open(f"/proc/{pid}/{what}", "rb")
            print(f"another user could open {what} of a member")
        except OSError:
            pass
"""

INTRUSIONS: tuple[Callable[[Sequence[Port], dict[str, int]], Iterator[str]], ...] = (
    by_the_store,
    by_pushing,
    by_the_page,
    by_another_user,
)


if __name__ == "__main__":
    main()
