"""Network namespaces that carry our prefix: made, entered, and swept away once their run is dead.

Every tunnel has an id and a lock file, locked for as long as the process that built it lives; the
kernel drops the lock on any exit, kill -9 included. The next tunnel removes namespaces of ours
whose lock nobody holds. What a namespace contains (links, addresses, shaping) goes with it, so
names are all there is to tidy.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from paceline.errors import MissingError, PacelineError

PREFIX = "paceline-"
NAMESPACES = Path("/run/netns")
LOCKS = Path("/run/paceline")

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def require_rights() -> None:
    """Raise MissingError, naming everything that is missing, where no tunnel can be built."""
    missing = missing_rights()
    if missing:
        problem = f"the tunnel cannot be built here: {', '.join(missing)} missing."
        fix = "run as root on Linux, with Debian's package iproute2 installed."
        raise MissingError(problem, fix)


def missing_rights() -> list[str]:
    """What a tunnel needs and this process lacks; empty when it can be built."""
    missing = [f"the command {name}" for name in ("ip", "tc") if shutil.which(name) is None]
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return ["Linux", *missing]
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    missing += [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    return missing


class Lease:
    """The id of a living tunnel, and the right to namespaces of that name."""

    def __init__(self) -> None:
        LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _registry():
            self.id = secrets.token_hex(3)
            self._path = LOCKS / f"{self.id}.lock"
            self._lock = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def name(self, host: str) -> str:
        return f"{PREFIX}{self.id}-{host}"

    def release(self) -> None:
        """Remove every namespace of this tunnel, with what still runs inside."""
        with _registry():
            _remove(_namespaces_of(self.id))
            self._path.unlink(missing_ok=True)
        os.close(self._lock)


def sweep() -> list[str]:
    """Remove what dead tunnels left behind; return the namespaces removed."""
    LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
    removed: list[str] = []
    with _registry():
        ids = {name.removeprefix(PREFIX).partition("-")[0] for name in list_ours()}
        ids |= {path.stem for path in LOCKS.glob("*.lock")}
        for dead in sorted(id for id in ids if not _is_alive(id)):
            names = _namespaces_of(dead)
            _remove(names)
            (LOCKS / f"{dead}.lock").unlink(missing_ok=True)
            removed += names
    return removed


def list_ours() -> list[str]:
    """Names of all namespaces that carry our prefix, whoever made them."""
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}*"))


def call_in(namespace: str, function: Callable[[], T]) -> T:
    """Call `function` in a thread that has entered `namespace`. Sockets it opens stay in there."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            with open(NAMESPACES / namespace, "rb") as handle:
                if _libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"in {namespace}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def die_with_parent() -> None:
    """Called first by a helper process of a tunnel: the kernel ends it with the one that started
    it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ip(*arguments: str, batch: Iterable[str] = (), namespace: str = "") -> str:
    """Run `ip` (with many lines at once as `batch`) and return what it printed."""
    return _command("ip", arguments, batch, namespace)


def tc(*arguments: str, batch: Iterable[str] = (), namespace: str = "") -> str:
    """Run `tc`, as `ip` above."""
    return _command("tc", arguments, batch, namespace)


def _command(tool: str, arguments: Iterable[str], batch: Iterable[str], namespace: str) -> str:
    lines = "".join(f"{line}\n" for line in batch)
    inside = ["-n", namespace] if namespace else []
    argv = [tool, *inside, *(["-batch", "-"] if lines else []), *arguments]
    done = subprocess.run(
        argv, input=lines, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        said = done.stderr.strip().replace("\n", "; ")
        raise PacelineError(f"`{' '.join(argv)}` failed: {said or 'it said nothing'}")
    return done.stdout


def qdiscs(namespace: str) -> list[dict[str, object]]:
    """All queueing disciplines in `namespace`, as tc reports them."""
    parsed: list[dict[str, object]] = json.loads(tc("-j", "qdisc", "show", namespace=namespace))
    return parsed


@contextlib.contextmanager
def _registry() -> Iterator[None]:
    """One process at a time makes or sweeps: a lock file is never seen before it is locked."""
    handle = os.open(LOCKS / "registry", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_alive(tunnel_id: str) -> bool:
    try:
        handle = os.open(LOCKS / f"{tunnel_id}.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _namespaces_of(tunnel_id: str) -> list[str]:
    return [name for name in list_ours() if name.startswith(f"{PREFIX}{tunnel_id}-")]


def _remove(names: list[str]) -> None:
    for name in names:
        # A process that outlived its run would keep the links alive under a name that is gone.
        for pid in ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "delete", name)
