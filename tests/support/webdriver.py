"""A headless browser for tests: chromium, driven through chromedriver's plain HTTP interface."""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "chromium and chromedriver are not installed"

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,1600",
)


class Browser:
    """One browser window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, address: str) -> None:
        _call("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        body = {"script": f"return {script}", "args": []}
        return _call("POST", f"{self._session}/execute/sync", body)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the page did not show {what}"
            time.sleep(0.2)

    def logged_errors(self) -> list[str]:
        entries = _call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that is gone, with all its processes, when the block ends."""
    driver = subprocess.Popen(
        [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    session = ""
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        root = f"http://127.0.0.1:{line.split()[-1].rstrip('.')}"
        options = {
            "binary": CHROMIUM,
            "args": [*ARGUMENTS, f"--user-data-dir={profile}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        capabilities = {"capabilities": {"alwaysMatch": wanted}}
        answer = _call("POST", f"{root}/session", capabilities)
        session = f"{root}/session/{answer['sessionId']}"
        yield Browser(session)
    finally:
        if session:
            _call("DELETE", session)
        driver.terminate()
        driver.wait(10)
        if driver.stdout is not None:
            driver.stdout.close()


def _call(method: str, address: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]
