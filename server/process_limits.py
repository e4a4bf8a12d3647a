"""What the server asks of the C library's allocator.

How many files and connections the server and its run processes may have open.
"""

import ctypes
import resource
from contextlib import suppress

KEPT_BYTES = 256 << 20
LARGEST_POOLED_BYTES = 4 << 20

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Keep up to ``KEPT_BYTES`` of what a reply needed for the next one, in one pool for all threads.

    glibc would give it back to the kernel, which clears each page of it anew: that takes longer than reading the
    bodies from the page cache. Does nothing with another C library. To be called before threads start.
    """
    with suppress(OSError, AttributeError):  # no C library to ask, or one without this call
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_POOLED_BYTES)
        mallopt(_M_ARENA_MAX, 1)


WANTED = 65_536
"""Enough for every engine call and every reader; no more, since some programs walk through all that they may have."""


def allow_many_files() -> None:
    """Raise the limit on open files towards ``WANTED``; processes that are started later inherit it.

    Many systems begin with 1 024, for programs that use ``select``. A run with a thousand engine calls in flight needs
    more, and the system lets each process raise it up to a limit of its own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
