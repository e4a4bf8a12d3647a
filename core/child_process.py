"""What the processes in which users' code runs have in common. Imports only the standard library: it starts fast."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO

SERVER_ONLY_VARIABLES = ("FOREBAY_TOKEN",)
_PR_SET_PDEATHSIG = 1


def python_argv(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module``. ``-P`` keeps the working directory from shadowing installed packages."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The server's environment without the token that opens every run: user code gets its own run's key only."""
    return {name: value for name, value in environ.items() if name not in SERVER_ONLY_VARIABLES}


def memory_file(name: str) -> BinaryIO:
    """An anonymous, unbuffered file to hand to a child by descriptor: nothing in argv, environment or on disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b", buffering=0)
    import tempfile  # a tenth of what the monitor loads, and needed outside Linux only

    return tempfile.TemporaryFile(buffering=0)


def read_back(file: BinaryIO) -> bytes:
    """Everything that a child wrote to ``file``."""
    file.seek(0)
    return file.read()


def signal_group(leader_pid: int, signal_number: int) -> None:
    """Signal the process group of ``leader_pid``; a group that is gone is no error."""
    # The whole group: users' code starts processes of its own.
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, signal_number)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; end now if ``parent_pid`` is dead already.

    The kernel means the parent's thread that started this process: start from one that lasts.
    """
    if sys.platform == "linux":
        import ctypes  # the monitor, which needs none of this, starts with every run

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel says nothing of a parent that died before it was asked to watch.
    if os.getppid() != parent_pid:
        os._exit(1)
