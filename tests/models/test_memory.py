"""Freed memory stays with the process: counted in page faults, in a process of its own."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from paceline.models.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):  # until the heap has found its size
    torch.ones(12_000_000)
before = faults()
for _ in range(10):
    torch.ones(12_000_000)
print(faults() - before)
"""


def page_faults(setting: str) -> int:
    command = [sys.executable, "-c", PROGRAM, setting]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_memory_once_used_costs_no_more_page_faults():
    pages_each_time = 12_000_000 * 4 // 4096
    assert page_faults("keep") < pages_each_time
    assert page_faults("leave") > 5 * pages_each_time
