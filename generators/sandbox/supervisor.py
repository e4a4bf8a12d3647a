"""The process between a sandbox and its command: starts the command and leaves none of its processes behind.

``python -I -S supervisor.py SOCKET_FD`` reads a line of JSON (argv, folder, environment, limits) from the socket and
answers with JSON. It imports only the standard library, so that it starts in hundredths of a second.
"""

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILLING_S = 10.0
"""Time limit for killing processes. Those left after it changed their user, or hang in the kernel."""


def main(socket_fd: int) -> None:
    """Run one command until it ends, its time is up, or the sandbox closes the socket."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Not SIGKILL, so that this process can clean up when the run process dies.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parent = os.getppid()
    with socket.socket(fileno=socket_fd) as sandbox:
        spec = _read_line(sandbox)
        try:
            result = _run(spec, sandbox)
        finally:
            # This process must not end before its children.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            num_left = kill_descendants()
            if os.getppid() != parent:
                # The run process is gone and cannot remove it.
                shutil.rmtree(spec["folder"], ignore_errors=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = {**result, "num_left": num_left, "cpu_s": used.ru_utime + used.ru_stime}
        with suppress(BrokenPipeError, ConnectionResetError):
            sandbox.sendall(json.dumps(answer).encode())


def _read_line(sandbox: socket.socket) -> dict[str, Any]:
    with sandbox.makefile("rb") as lines:
        line: dict[str, Any] = json.loads(lines.readline() or b"null") or sys.exit(1)
    return line


def _run(spec: dict[str, Any], sandbox: socket.socket) -> dict[str, Any]:
    """Run the command and return its exit status, or an error."""
    began_s = time.monotonic()
    try:
        process = subprocess.Popen(  # noqa: S603 - running the given command is the purpose
            spec["argv"],
            cwd=spec["folder"],
            env=spec["env"],
            start_new_session=True,
            preexec_fn=_limiter(spec["limits"]),  # noqa: PLW1509 - this process has no threads
        )
    except (OSError, ValueError) as error:
        return {"error": f"{spec['argv'][0]!r} cannot be started: {error}"}
    is_over = _wait(process.pid, sandbox, spec["wall_s"])
    # Negative for a signal, as in `subprocess`.
    status = process.wait() if is_over else None
    return {"exit_status": status, "wall_s": time.monotonic() - began_s}


def _wait(pid: int, sandbox: socket.socket, wall_s: float) -> bool:
    """Wait until the command ends. Returns False if its time is up or the sandbox closes the socket first."""
    ending = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([ending, sandbox.fileno()], [], [], wall_s)
    finally:
        os.close(ending)
    return ending in ready


def _limiter(limits: dict[str, int]) -> Callable[[], None]:
    def limit() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for name, value in limits.items():
            _lower(getattr(resource, name), value)

    return limit


def _lower(kind: int, value: int) -> None:
    # Only root may raise limits, so they are only lowered.
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def kill_descendants() -> int:
    """Kill all descendants, including new ones and those in other sessions. Returns how many are left."""
    # As their subreaper, we inherit every process whose parent has died, so none can leave the tree.
    until_s = time.monotonic() + KILLING_S
    while (left := _descendants()) and time.monotonic() < until_s:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.001)
    return len(left)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants() -> list[int]:
    """Return all descendants of this process, including zombies."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                children.setdefault(_parent(name), []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # grows during the iteration
        found.extend(children.get(pid, ()))
    return found


def _parent(pid: str) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # The process name before it is in brackets and may contain brackets and spaces.
        return int(stat.read().rpartition(b")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
