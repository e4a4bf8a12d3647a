"""How many files and connections the server and its run processes may have open."""

import resource

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
