"""Two hosts that are network namespaces with a cable between them; root, iproute2, nftables."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

A, B = "10.77.0.1", "10.77.0.2"
PORT = 7718


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = {A: f"pacetest-{os.getpid()}-a", B: f"pacetest-{os.getpid()}-b"}

    def start(self) -> None:
        a, b = self.names.values()
        run("ip", "netns", "add", a)
        run("ip", "netns", "add", b)
        run("ip", "-n", a, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", b)
        for address, name in self.names.items():
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        self._await_carrier()

    def _await_carrier(self) -> None:
        """The kernel takes up to a second to notice that both ends of a cable are up."""
        deadline = time.monotonic() + 10
        for name in self.names.values():
            shown = ["ip", "-n", name, "-br", "link", "show", "eth0", "up"]
            while " UP " not in subprocess.run(shown, capture_output=True, text=True).stdout:
                assert time.monotonic() < deadline, f"eth0 of {name} did not come up"
                time.sleep(0.02)

    def end(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def filter(self, address: str, rule: str) -> None:
        """Drop what arrives at `address` and matches `rule`."""
        self.inside(address, "nft", "add table inet t")
        self.inside(address, "nft", "add chain inet t c { type filter hook input priority 0 ; }")
        self.inside(address, "nft", f"add rule inet t c {rule} drop")

    def inside(self, address: str, *line: str) -> None:
        run("ip", "netns", "exec", self.names[address], *line)

    def doctor(
        self, changed: dict[str, dict[str, str]] | None = None, deadline: str = "25s"
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, int]]:
        """The same command on both hosts: the answer of the first, all errors, exit statuses."""
        flags = ["--hosts", f"{A},{B}", "--port", str(PORT), "--deadline", deadline, "--json"]
        flags += ["--shared-memory", "1MiB"]
        said, statuses = self.run(["doctor", *flags], changed or {})
        answer = json.loads(said[A][0]) if said[A][0] else {}
        return answer, {address: errors for address, (_, errors) in said.items()}, statuses

    def run(
        self,
        arguments: list[str],
        changed: dict[str, dict[str, str]],
        cwd: str | None = None,
        before: tuple[str, ...] | list[str] = (),
    ) -> tuple[dict[str, tuple[str, str]], dict[str, int]]:
        """`paceline` on both hosts at once: what each printed (output, errors), exit statuses."""
        started = {}
        for address, name in self.names.items():
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **changed.get(address, {})}
            line = ["ip", "netns", "exec", name, *before]
            line += [sys.executable, "-m", "paceline", *arguments]
            started[address] = subprocess.Popen(
                line,
                env=environment,
                cwd=cwd,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        try:
            said = {a: process.communicate(timeout=90) for a, process in started.items()}
        finally:
            for process in started.values():
                process.kill()
                process.wait()
        return said, {address: process.returncode for address, process in started.items()}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    missing = [name for name in ("ip", "nft") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, iproute2 and nftables; missing: {', '.join(missing) or 'root'}")
    made = Hosts()
    try:
        made.start()
        yield made
    finally:
        made.end()


def run(*line: str) -> None:
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0 and "not supported" in done.stderr:
        pytest.skip(f"{' '.join(line[:3])}: {done.stderr.strip()}")
    assert done.returncode == 0, f"{' '.join(line)}: {done.stderr}"
