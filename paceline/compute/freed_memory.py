"""Freed memory of a process that trains is kept, not returned.

A training step allocates and frees the same large tensors again and again. The C library returns
each to the kernel and fetches fresh pages, zeroed one by one, in the next step: 8,000 page faults a
step for the tutorial network, 53,000 for AlexNet (docs/experiments.md).
"""

import ctypes

# From malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def return_freed_memory() -> None:
    """Give back what was freed so far, once: what setting up took and training will not need."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return


def keep_freed_memory() -> bool:
    """Let this process reuse the memory it frees; call it once, before tensors are made.

    Returns False where the C library has no such setting (it is glibc's): nothing changes then.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    from_the_heap: bool = set_option(M_MMAP_MAX, 0) == 1
    never_returned: bool = set_option(M_TRIM_THRESHOLD, 2**31 - 1) == 1
    return from_the_heap and never_returned
