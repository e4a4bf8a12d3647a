"""The process between a sandbox and its command: it starts the command, and leaves no process of it behind.

``python -I -S supervisor.py SOCKET_FD``. Reads a line of JSON (argv, folder, environment, limits) from the socket,
and answers with JSON. Imports only the standard library: it starts in hundredths of a second.
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
"""What is not gone by then cannot be killed by us: it changed its user, or hangs in the kernel."""


def main(socket_fd: int) -> None:
    """Run one command to its end, its time limit, or until the sandbox hangs up."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Not SIGKILL: when the run process dies, this one cleans up first.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parent = os.getppid()
    with socket.socket(fileno=socket_fd) as sandbox:
        spec = _read_line(sandbox)
        try:
            result = _run(spec, sandbox)
        finally:
            # Nothing may end this process before its children have ended.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            num_left = _kill_descendants()
            if os.getppid() != parent:
                # Nobody else is left to do it.
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
    """The exit status of the command, or why there is none."""
    began_s = time.monotonic()
    try:
        process = subprocess.Popen(  # noqa: S603 - running what the spec says is what we are for
            spec["argv"],
            cwd=spec["folder"],
            env=spec["env"],
            start_new_session=True,
            preexec_fn=_limiter(spec["limits"]),  # noqa: PLW1509 - this process has no threads
        )
    except (OSError, ValueError) as error:
        return {"error": f"{spec['argv'][0]!r} cannot be started: {error}"}
    is_over = _wait(process.pid, sandbox, spec["wall_s"])
    # Negative is a signal, as everywhere in Python.
    status = process.wait() if is_over else None
    return {"exit_status": status, "wall_s": time.monotonic() - began_s}


def _wait(pid: int, sandbox: socket.socket, wall_s: float) -> bool:
    """Until the command ends (true), or its time is up, or the sandbox hangs up."""
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
    # Limits can be lowered, and only root may raise them.
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _kill_descendants() -> int:
    """Kill every process below this one, also in other sessions and those started meanwhile; how many are left."""
    # As their subreaper we inherit each process whose parent has died, so none can leave the tree.
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
    """Every process below this one; those that are dead and not yet waited for too."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                children.setdefault(_parent(name), []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, ()))
    return found


def _parent(pid: str) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # The name before it stands in brackets, and may hold brackets and spaces itself.
        return int(stat.read().rpartition(b")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
