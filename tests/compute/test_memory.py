"""Freed memory stays with the process, and is given back when asked; each in an own process."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quiet

PROGRAM = """
import resource, sys, torch
from paceline.compute.freed_memory import keep_freed_memory
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


RETURNING = """
import psutil, torch
from paceline.compute.freed_memory import keep_freed_memory, return_freed_memory
keep_freed_memory()
kept = []
for _ in range(40):  # what is freed lies between what is not: there is no top to trim
    freed = torch.ones(1_000_000)
    kept.append(torch.ones(1000))
    del freed
    kept.append(torch.ones(1_000_000))
del kept[1::2]
before = psutil.Process().memory_info().rss
return_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the call is glibc's")
def test_what_was_freed_is_given_back_when_asked():
    command = [sys.executable, "-c", RETURNING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > 100 * 2**20
