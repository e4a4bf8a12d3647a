"""Servers that are forked from a process that has loaded already what a server loads, and does nothing else.

Loading takes nine tenths of a start, and tests start hundreds of servers. Such a server is a process of its own like
any other: it runs the command line from its first step, with its own arguments, variables, folder and output. Linux
only. Run as a program, this file is the process that forks.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from forebay.core.child_process import skip_httpx_command

PYTHON = os.environ.get("FOREBAY_SERVER_PYTHON", sys.executable)
"""What runs the servers: `make test-browser` names the Python of an environment with the wheel."""
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "SQLITE_", "FOREBAY_TOKEN")
"""Beginnings of variables that count when Python or a C library starts; a token's place is overwritten there."""
_REQUEST_BYTES = 1 << 20
_ONE_AT_A_TIME = threading.Lock()


class ForkedServer:
    """As far as tests need it, what ``Popen`` is for a process that somebody else started."""

    def __init__(self, pid: int, stdout: IO[str], status: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self._status = status
        """Descriptor from which its exit status can be read once it has ended."""
        self._code: int | None = None

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self._code is None and not _is_readable(self._status, 0):
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """Its exit code, as ``Popen`` tells it."""
        if self._code is None:
            if not _is_readable(self._status, timeout):
                raise subprocess.TimeoutExpired("a forked server", timeout)
            self._code = int(os.read(self._status, 100))
            os.close(self._status)
        return self._code


def launch(arguments: Sequence[str], cwd: Path, env: Mapping[str, str], log: IO[str]) -> ForkedServer | None:
    """``python -m forebay.server.cli ARGUMENTS``; None where only a start of Python itself can heed ``env``."""
    if not hasattr(os, "pidfd_open") or "FOREBAY_TOKEN" in env or _read_at_start(env) != _AT_START:
        return None
    stdout, written = os.pipe()
    status, told = os.pipe()
    request = json.dumps({"arguments": [*arguments], "cwd": str(cwd), "env": dict(env)}).encode()
    with _ONE_AT_A_TIME:
        forker = _forker()
        socket.send_fds(forker, [request], [written, log.fileno(), told])
        pid = int(forker.recv(100))
    os.close(written)
    os.close(told)
    return ForkedServer(pid, os.fdopen(stdout), status)


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


_AT_START = _read_at_start(os.environ)


@cache
def _forker() -> socket.socket:
    """The way to the process that forks: one for this process, which it does not outlive."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
    with theirs:
        command = [PYTHON, "-P", __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    @atexit.register
    def end() -> None:
        ours.close()
        process.terminate()
        process.wait()

    return ours


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1_000))


def _fork_on_request(requests: socket.socket) -> dict[str, Any]:
    """Returns in each process that is forked, with what it is to be. Ends when nobody is left to ask."""
    children: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                pid, told = children.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                os.write(told, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(told)
                continue
            message, received, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
            if not message:
                raise SystemExit
            stdout, log, told = received
            pid = os.fork()
            if pid == 0:
                os.dup2(stdout, 1)
                os.dup2(log, 2)
                others = [each for pidfd, (_, status) in children.items() for each in (pidfd, status)]
                for each in [*received, *others]:
                    os.close(each)
                return dict(json.loads(message))
            os.close(stdout)
            os.close(log)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (pid, told)
            poll.register(pidfd, select.POLLIN)
            requests.send(b"%d" % pid)


def _main() -> None:
    skip_httpx_command()
    from forebay.server import cli, server_process  # noqa: F401 -- what the command loads
    from forebay.server.cli import command_line  # noqa: F401

    with socket.socket(fileno=int(sys.argv[1])) as requests:
        request = _fork_on_request(requests)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path.insert(0, request["cwd"])  # as ``python -m`` does
    sys.argv[1:] = request["arguments"]
    cli.main()


if __name__ == "__main__":
    _main()
