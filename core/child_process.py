"""Helpers for Forebay's processes. Imports only the standard library, so that processes with users' code start fast."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

SERVER_ONLY_VARIABLES = ("FOREBAY_TOKEN", "FOREBAY_VIEWER_TOKEN")
_MODULE_FLAGS = ("-P", "-m")
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
KILLING_S = 5.0
"""Seconds after which a process cannot be killed: it changed its user, or hangs in the kernel."""


def python_argv(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module``. ``-P`` keeps the working directory from shadowing installed packages."""
    return [sys.executable, *_MODULE_FLAGS, module, *arguments]


def is_own_program(pid: int) -> bool:
    """Whether a process was started with ``python_argv`` and a Forebay module. Linux only; raises ``OSError``."""
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        words = os.fsdecode(cmdline.read()).split("\0")
    return tuple(words[1:3]) == _MODULE_FLAGS and words[3].startswith("forebay.")


def skip_httpx_command() -> None:
    """Make a later import of ``httpx`` skip its command line, which loads ``rich`` and takes half of the time."""
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type] # makes Python treat the module as missing


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The server's environment without its tokens, which open every run: user code gets only its own run's key."""
    return {name: value for name, value in environ.items() if name not in SERVER_ONLY_VARIABLES}


def last_line(text: str) -> str:
    """The last non-empty line; in a traceback, the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def signal_group(leader_pid: int, signal_number: int) -> None:
    """Signal the process group of ``leader_pid``; ignores a group that is gone."""
    # The whole group, because users' code starts its own processes.
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, signal_number)


def end_session(session: int) -> None:
    """Kill the rest of a session below this process, in whatever process groups, and wait for our own children.

    Does not wait for the session's leader; its parent does. Takes some milliseconds.
    """
    until_s = time.monotonic() + KILLING_S
    while True:
        # Listed before the kill: children of killed processes are no longer below them.
        table = _processes()
        members = [pid for pid, process in table.items() if process.session == session and _is_below_us(pid, table)]
        signal_group(session, signal.SIGKILL)
        for pid in members:
            if table[pid].is_dead and pid != session:
                reap(pid)
            else:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if not members or members == [session] or time.monotonic() > until_s:
            return
        time.sleep(0.002)


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose parent ends, as ``init`` would. Linux only."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def dead_children() -> set[int]:
    """Children that have ended but have not been waited for."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    return {pid for pid, process in _processes().items() if process.parent == os.getpid() and process.is_dead}


def reap(pid: int) -> None:
    """Wait for a child that has ended; ignores other processes."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class _Process(NamedTuple):
    parent: int
    session: int
    is_dead: bool


def _processes() -> dict[int, _Process]:
    """All visible processes; none if the system has no ``/proc``."""
    found: dict[int, _Process] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The name before it is in brackets, and may contain brackets and spaces.
                state, parent, _, session = stat.read().rpartition(b")")[2].split()[:4]
                found[int(name)] = _Process(int(parent), int(session), state in b"ZX")
    return found


def _is_below_us(pid: int, table: Mapping[int, _Process]) -> bool:
    while pid in table:
        pid = table[pid].parent
        if pid == os.getpid():
            return True
    return False


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exit now if ``parent_pid`` is already dead.

    The kernel watches the parent's thread that started this process, so start it from a long-lived thread.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel does not report a parent that died before the call above.
    if os.getppid() != parent_pid:
        os._exit(1)


def close_to_others() -> None:
    """Prevent other processes of this user from reading this one's memory, descriptors and initial environment.

    Programs that it starts can be read again. A process with ``CAP_SYS_PTRACE`` still can read this one.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    import ctypes  # not needed by the monitor, which starts with every run

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
