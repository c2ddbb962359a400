"""Describe the machine a run happened on. Reads files and package metadata; loads no torch."""

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = (
    "paceline",
    "torch",
    "numpy",
    "cryptography",
    "msgspec",
    "mpi4py",
    "tensorflow-cpu",
    "ray",
)


def describe() -> dict[str, object]:
    """The machine and the software, as far as they can be known."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "packages": versions(),
    }


def versions() -> dict[str, str]:
    """Installed versions of what a run depends on; what is not installed is left out."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
