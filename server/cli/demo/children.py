"""Processes that a command starts: each in its own session, ended with the command, if necessary by the kernel."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self

from forebay.core.child_process import signal_group
from forebay.core.errors import ForebayError

STOP_GRACE_S = 25.0
LOG_TAIL_LINES = 8

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Child:
    """A module of this program run as a process. Its stderr goes to ``log``; stdout is read by ``first_line``."""

    def __init__(self, name: str, module: str, *arguments: str, log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules and arguments
                # -P: it runs in the user's folder, which may have a module of any name.
                [sys.executable, "-P", "-m", "forebay.server.cli.demo.child", str(os.getpid()), module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,
                env=dict(environ),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_alive(self) -> None:
        """Raise ``ForebayError`` with the last log lines if the process has ended."""
        if self._process.poll() is not None:
            raise self._failure(f"ended with exit code {self._process.returncode}")

    def first_line(self, limit_s: float) -> str:
        """The first line of its standard output. Raises ``ForebayError`` if it ends or ``limit_s`` pass before."""
        assert self._process.stdout is not None
        until_s, text = time.monotonic() + limit_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in text:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise self._failure(f"was not ready within {limit_s:g} s")
                part = os.read(self._process.stdout.fileno(), 4096)
                if not part:
                    self._process.wait()
                    raise self._failure(f"ended with exit code {self._process.returncode}")
                text += part
        return text.split(b"\n")[0].decode()

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and after ``grace_s`` SIGKILL to what is left of its process group."""
        self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        # Also after an orderly end: its own children may have outlived it.
        signal_group(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _failure(self, what: str) -> ForebayError:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return ForebayError("\n  ".join([f"the {self.name} {what}", *lines]), hint=f"the full log is {self._log}")


class Children:
    """Ends its children on exit, the last one started first; a second signal meanwhile has no effect.

    Inside, SIGTERM and SIGHUP end this process like Ctrl-C, through every ``finally``: with exit code 128 + signal.
    """

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(self, name: str, module: str, *arguments: str, log: Path, environ: Mapping[str, str]) -> Child:
        """Start a child that is stopped on exit."""
        child = Child(name, module, *arguments, log=log, environ=environ)
        self._children.append(child)
        return child

    def check_alive(self) -> None:
        """Raise ``ForebayError`` if any child has ended."""
        for child in self._children:
            child.check_alive()

    def __enter__(self) -> Self:
        # Signals that are already ignored stay ignored: under nohup, closing the terminal ends nothing.
        heard = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, _exit) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C would end this process between two children, and leave the others running.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        for child in reversed(self._children):
            child.stop(STOP_GRACE_S)
        for number, handler in {**self._before, signal.SIGINT: interrupt}.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
