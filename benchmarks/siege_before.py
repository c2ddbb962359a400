"""Before step 1: strangers at the ports where members find and examine each other.

    python benchmarks/siege_before.py --messages 100000 --json

Between hosts members examine each other before they train, and so does `paceline doctor`: worker 0
listens for the others, and each of them has a door at which the rest knock. On one host, under
mpirun or torchrun, worker 0 tells the others where it is through a socket that answers this user
only. The last member stays away until strangers have sent so many malformed messages to each port.
Checked: nobody ends or grows, and then members find each other as if they had been alone.
"""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from besieged import GROWTH_FILES, QUIET_SECONDS
from siege import GROWTH_BYTES, asked, attack
from strangers import Port

from paceline.diagnose.doctor import Examination, examine, gather
from paceline.launch import Identity
from paceline.launch.rendezvous import meet

SECONDS = 3000.0
KEY = "the key of this siege"
OTHERS_KEY = "the key of another job"
MEMBERS = 3


def main() -> None:
    given = asked(__doc__, SIEGES)
    rows = []
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {given.messages} messages to each port", file=sys.stderr, flush=True)
            rows.append(SIEGES[name](Path(folder), given.messages, given.seed, given.ports))
    result = {"rows": rows, "checks": [check for row in rows for check in checks(row)]}
    print(json.dumps(result, indent=None if given.json else 1))


def checks(row: dict[str, Any]) -> list[dict[str, Any]]:
    held = {
        "members find each other": row["found"],
        "bytes grown": row["bytes_grew"] < GROWTH_BYTES,
        "files grown": row["files_grew"] <= GROWTH_FILES,
        "threads grown": row["threads_grew"] <= 0,
    }
    return [
        {"name": f"{row['name']}: {what}", "value": holds, "target": True, "holds": holds}
        for what, holds in held.items()
    ]


# The examination.


def besiege_doctor(
    folder: Path, messages: int, seed: int = 0, only: Sequence[str] | None = None
) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
        with _processes(_attend, [(index, where[1], listener, folder) for index in (0, 1)]) as two:
            doors = [_door(process.pid, where[1]) for process in two]
            hello, knock = _overheard()
            ports = [Port("examination", where, "lines", (hello,))]
            ports += [
                Port(f"door{index}", ("127.0.0.1", door), "token", (knock,))
                for index, door in enumerate(doors)
            ]
            ports = [port for port in ports if only is None or port.name in only]
            seen = _besieged(two, ports, messages, seed)
            with _processes(_attend, [(2, where[1], None, folder)]) as last:
                for process in (*two, *last):
                    process.join(120)
    told = [folder / f"member{index}" for index in range(MEMBERS)]
    found = [
        msgspec.json.decode(one.read_bytes(), type=Examination) for one in told if one.exists()
    ]
    healthy = [
        not one.missing and not any(pair.problem for pair in one.pairs) and len(one.pairs) == 6
        for one in found
    ]
    return {"name": "doctor", **seen, "found": len(healthy) == MEMBERS and all(healthy)}


def _identity(index: int, port: int, key: str = KEY) -> Identity:
    return Identity(
        index=index,
        workers=MEMBERS,
        host=f"host{index}",
        coordinator=f"127.0.0.1:{port}",
        local_index=index,
        local_members=MEMBERS,
        key=key,
    )


def _attend(index: int, port: int, listener: socket.socket | None, folder: Path) -> None:
    identity = _identity(index, port)
    examination = examine(
        identity,
        gather(identity, os.environ),
        listener=listener if index == 0 else None,
        bandwidth=False,
        deadline_seconds=SECONDS,
    )
    (folder / f"member{index}").write_bytes(msgspec.json.encode(examination))


def _door(pid: int | None, coordinator: int) -> int:
    """The port of a member's door."""
    assert pid is not None
    until = time.monotonic() + 60
    while time.monotonic() < until:
        listening = [
            one.laddr.port
            for one in psutil.Process(pid).net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port != coordinator
        ]
        if listening:
            return int(listening[0])
        time.sleep(0.05)
    raise AssertionError("a member has no door")


def _overheard() -> tuple[bytes, bytes]:
    """What a member of another job says to its worker 0, and then to a door."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with _processes(_attend, [(1, port, None, Path("/nonexistent"))]):
            for _ in range(2):  # the first call only looks whether somebody is there
                line, _ = listener.accept()
            with line:
                line.sendall(b'"a question of another time"\n')
                hello = b""
                while not hello.endswith(b"\n"):
                    hello += line.recv(65536)
    return hello, os.urandom(16) + b"p" + bytes(8)


# Where members meet on one host.


def besiege_meeting(
    folder: Path, messages: int, seed: int = 0, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """By another user, as this one's processes are trusted; only root can try."""
    if os.geteuid() != 0:
        raise SystemExit("only root can call as another user")
    before = _abstract()
    with _processes(_meet, [(0, folder)]) as first:
        until = time.monotonic() + 60
        while not (names := _abstract() - before) and time.monotonic() < until:
            time.sleep(0.05)
        (name,) = names
        port = Port("meeting", name, "token", (bytes(4),))
        seen = _besieged(first, [port], messages, seed, as_another_user=True)
        with _processes(_meet, [(1, folder)]) as last:
            for process in (*first, *last):
                process.join(120)
    told = [(folder / f"met{index}") for index in range(2)]
    found = {one.read_text() for one in told if one.exists()}
    return {"name": "meeting", **seen, "found": all(map(Path.exists, told)) and len(found) == 1}


def _meet(index: int, folder: Path) -> None:
    identity = Identity(index=index, workers=2, local_index=index, local_members=2)
    met = meet(msgspec.structs.replace(identity, launcher="torchrun"), os.environ, SECONDS)
    (folder / f"met{index}").write_text(f"{met.coordinator} {met.key}")


def _abstract() -> set[str]:
    """Names of the sockets at which somebody of ours listens on this host."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.rpartition("@")[2] for line in lines if "@paceline-" in line}


def _besieged(
    members: list[Any], ports: list[Port], messages: int, seed: int, as_another_user: bool = False
) -> dict[str, Any]:
    """What strangers have sent, and what the members use more than before."""
    at_rest = _use(members)
    _send(ports, max(1, messages // 10), seed, as_another_user)
    before = _quiet(members, at_rest)
    began = time.monotonic()
    sent = _send(ports, messages, seed + 1000, as_another_user)
    seconds = time.monotonic() - began
    after = _quiet(members, before)
    grown = {f"{what}_grew": after[what] - before[what] for what in before}
    rate = sum(sent.values()) / seconds
    return {"messages": sent, "messages_per_second": rate, "seconds": seconds, **grown}


def _send(ports: list[Port], messages: int, seed: int, as_another_user: bool) -> dict[str, int]:
    if not as_another_user:
        return dict(sorted(attack(ports, messages, seed)[0].items()))
    asked = json.dumps({"name": ports[0].address, "messages": messages, "seed": seed})
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n{_AS_NOBODY}"
    command = [sys.executable, "-c", code, asked]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(said))


_AS_NOBODY = """
import json, os
from siege import attack
from strangers import Port
asked = json.loads(sys.argv[1])
os.setgroups([]), os.setgid(65534), os.setuid(65534)
port = Port("meeting", asked["name"], "token", (bytes(4),))
print(json.dumps(attack([port], asked["messages"], asked["seed"])[0]))
"""


def _use(members: list[Any]) -> dict[str, int]:
    processes = [psutil.Process(member.pid) for member in members]
    return {
        "bytes": sum(process.memory_info().rss for process in processes),
        "files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
    }


def _quiet(members: list[Any], before: dict[str, int]) -> dict[str, int]:
    until = time.monotonic() + QUIET_SECONDS
    while True:
        used = _use(members)
        many = used["files"] > before["files"] + GROWTH_FILES
        if not (many or used["threads"] > before["threads"]) or time.monotonic() > until:
            return used
        time.sleep(0.1)


@contextlib.contextmanager
def _processes(function: Any, arguments: list[tuple[Any, ...]]) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=function, args=given) for given in arguments]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


SIEGES = {"doctor": besiege_doctor, "meeting": besiege_meeting}


if __name__ == "__main__":
    main()
