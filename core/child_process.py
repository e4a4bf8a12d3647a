"""What our processes have in common. Imports only the standard library: those in which users' code runs start fast."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

SERVER_ONLY_VARIABLES = ("FOREBAY_TOKEN",)
_MODULE_FLAGS = ("-P", "-m")
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
KILLING_S = 5.0
"""What is not gone by then cannot be killed by us: it changed its user, or hangs in the kernel."""


def python_argv(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module``. ``-P`` keeps the working directory from shadowing installed packages."""
    return [sys.executable, *_MODULE_FLAGS, module, *arguments]


def is_own_program(pid: int) -> bool:
    """Whether a process was started with ``python_argv`` and a module of ours. Linux only; raises ``OSError``."""
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        words = os.fsdecode(cmdline.read()).split("\0")
    return tuple(words[1:3]) == _MODULE_FLAGS and words[3].startswith("forebay.")


def skip_httpx_command() -> None:
    """Have ``httpx``, once it is imported, leave out its command line: that loads ``rich``, in half of the time."""
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type] # says to Python that there is no such module


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The server's environment without the token that opens every run: user code gets its own run's key only."""
    return {name: value for name, value in environ.items() if name not in SERVER_ONLY_VARIABLES}


def last_line(text: str) -> str:
    """The last one with something in it: of a traceback, the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def signal_group(leader_pid: int, signal_number: int) -> None:
    """Signal the process group of ``leader_pid``; a group that is gone is no error."""
    # The whole group: users' code starts processes of its own.
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, signal_number)


def end_session(session: int) -> None:
    """Kill what is left of a session below this process, whatever group it is in, and wait for those that are our own.

    Not for the session's leader: whoever started it waits for it. Takes some milliseconds.
    """
    until_s = time.monotonic() + KILLING_S
    while True:
        # Before anything is killed: what dies leaves children that are no longer below it.
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
    """Become the parent of every process below this one whose own parent ends, as ``init`` would. Linux only."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def dead_children() -> set[int]:
    """Our children that have ended, and that nobody has waited for."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    return {pid for pid, process in _processes().items() if process.parent == os.getpid() and process.is_dead}


def reap(pid: int) -> None:
    """Take the ending of a child that has ended; one that is not ours is no error."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class _Process(NamedTuple):
    parent: int
    session: int
    is_dead: bool


def _processes() -> dict[int, _Process]:
    """All processes that we can see; none where the system has no ``/proc``."""
    found: dict[int, _Process] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The name before it stands in brackets, and may hold brackets and spaces itself.
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
    """Have the kernel kill this process when its parent dies; end now if ``parent_pid`` is dead already.

    The kernel means the parent's thread that started this process: start from one that lasts.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel says nothing of a parent that died before it was asked to watch.
    if os.getppid() != parent_pid:
        os._exit(1)


def close_to_others() -> None:
    """Let no other process of this user look into this one: not its memory, its descriptors, its first environment.

    Programs that it starts can be looked into again. Who may trace every process (``CAP_SYS_PTRACE``) still can.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    import ctypes  # the monitor, which needs none of this, starts with every run

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
