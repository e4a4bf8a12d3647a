"""Hides the token given to a command from other processes of the same user, which run users' code.

``/proc/<pid>/environ`` and ``/proc/<pid>/cmdline`` show the original arguments and environment, even if the process
changes its variables later, because they show the memory that the kernel filled. So that memory is overwritten.
"""

import os
import sys
from itertools import pairwise
from pathlib import Path

from forebay.core.child_process import close_to_others

_VARIABLE, _OPTION = "FOREBAY_TOKEN", "--token"
_STAT = Path("/proc/self/stat")
_ARG_START, _STATE = 48, 3
"""Numbers of fields in ``_STAT``, as proc(5) counts them. The ends of arguments and environment follow the first."""


def hide_own_token() -> None:
    """Overwrite the token where other processes could read it, and forbid them to inspect this process's memory.

    Does nothing without a token. ``os.environ`` and ``sys.argv`` keep it.
    """
    variable = os.environ.get(_VARIABLE, "")
    shown = [(f"{_VARIABLE}=", variable)] if variable else []
    for before, argument in pairwise(sys.argv):
        if argument.startswith(f"{_OPTION}="):
            shown.append((f"{_OPTION}=", argument.removeprefix(f"{_OPTION}=")))
        elif before == _OPTION:
            shown.append((f"{_OPTION}\0", argument))
    if shown and sys.platform == "linux":
        for name, token in shown:
            _write_over(os.fsencode(name), os.fsencode(token))
        if variable:
            os.environ[_VARIABLE] = variable  # the C library still pointed at the overwritten memory
        close_to_others()


def _write_over(name: bytes, token: bytes) -> None:
    import ctypes  # most commands are given no token

    for begin, end in _places():
        memory = ctypes.string_at(begin, end - begin)
        at = memory.find(name + token + b"\0")
        if at >= 0:
            ctypes.memset(begin + at + len(name), ord("*"), len(token))


def _places() -> list[tuple[int, int]]:
    """Memory ranges of the arguments and environment that this process was started with."""
    # The program's name is in brackets, and may contain any character.
    fields = _STAT.read_bytes().rpartition(b")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[_ARG_START - _STATE :][:4])
    return [(arg_start, arg_end), (env_start, env_end)]
