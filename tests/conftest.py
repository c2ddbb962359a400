"""What every test is held to: a deadline (pyproject.toml), and nothing left behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that pytest and torch (on the first use of an optimizer) set themselves."""


# Examples are not timed, as no test is: one that waits for a core for 200 ms is not wrong. They are
# the same in every run, so that a fresh machine never fails by chance; `make fuzz` draws others.
settings.register_profile(
    "same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("fuzz", settings.get_profile("same"), derandomize=False, print_blob=True)
settings.load_profile("same")


def pytest_configure() -> None:
    """Signals as a terminal would have them: in the background, or under nohup, some are ignored,
    which every process that a test starts would inherit."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process, thread or environment variable outlives the test that made it."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    children = set(_children())
    yield
    deadline = time.monotonic() + 30  # those that were killed may have to wait for a core
    while time.monotonic() < deadline:
        left = set(_children()) - children
        late = {t for t in threading.enumerate() if t not in threads and t.is_alive()}
        if not left and not late:
            break
        time.sleep(0.05)
    assert not left, f"processes left: {[_describe(child) for child in left]}"
    assert not late, f"threads left: {late}"
    changed = {
        key
        for key in environment.keys() | os.environ.keys()
        if environment.get(key) != os.environ.get(key) and key not in NOT_OURS
    }
    assert not changed, f"environment changed: {changed}"


def _children() -> list[psutil.Process]:
    """Living children, without the two helpers that multiprocessing keeps on purpose."""
    kept = ("forkserver", "resource_tracker")
    return [c for c in psutil.Process().children() if not any(k in _describe(c) for k in kept)]


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "gone"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the repository; tests that need it skip where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("real data sets (shared/data beside the repository) are not here")
    return SHARED_DATA


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in a folder of its own, so relative paths land there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
