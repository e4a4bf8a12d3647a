"""Running commands of agents, tools and verifiers: in a folder of their own, within limits, and never left behind.

``supervisor`` is the program that starts each command in a process tree of its own and ends the whole tree; ``output``
keeps the beginning and the end of what a command prints.

This holds programs that run wild; it is no jail for programs that mean harm. Those need a container or another machine.
"""

import asyncio
import logging
import os
import shlex
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from forebay.core.errors import InvalidInput
from forebay.generators.sandbox.output import Kept, Tail, feed
from forebay.telemetry.tracing.tracer import span, trace_environment

logger = logging.getLogger(__name__)

SUPERVISOR = Path(__file__).with_name("supervisor.py")
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""What a command finds of our environment. The rest may hold keys of the trainer or the cluster."""

Command = str | Sequence[str]
"""A list of words, or a line for ``/bin/sh``."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a command may use. ``cpu_s``, ``memory_bytes`` and ``file_bytes`` hold for each process by itself.

    ``memory_bytes`` limits the address space, of which some programs (Node, Java) reserve far more than they use.
    """

    wall_s: float = 60.0
    cpu_s: int | None = None
    memory_bytes: int | None = None
    file_bytes: int | None = None
    output_bytes: int = 65_536
    """Kept of each output, half from its beginning and half from its end; the rest is read and thrown away."""

    def __post_init__(self) -> None:
        given = (self.wall_s, self.cpu_s, self.memory_bytes, self.file_bytes, self.output_bytes)
        if not all(0 < value < float("inf") for value in given if value is not None):
            raise InvalidInput(f"each limit of a command must be more than 0, got {self}", field="limits")

    def resources(self) -> dict[str, int]:
        """By the names of the module ``resource``."""
        given = {"RLIMIT_CPU": self.cpu_s, "RLIMIT_AS": self.memory_bytes, "RLIMIT_FSIZE": self.file_bytes}
        return {"RLIMIT_CORE": 0, **{name: int(value) for name, value in given.items() if value is not None}}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended. ``exit_status`` is negative for a signal, and None if it was killed at its time limit."""

    exit_status: int | None
    stdout: str
    stderr: str
    wall_s: float
    is_output_cut: bool
    cpu_s: float | None = None
    """Of all its processes; None if it killed the one that counts them."""
    printed: str = ""
    """The last ``output_bytes`` of both outputs together, as they came."""

    @property
    def is_timed_out(self) -> bool:
        return self.exit_status is None

    @property
    def problem(self) -> str:
        """What went wrong, with the end of what it said; empty if nothing did."""
        if self.exit_status == 0:
            return ""
        if self.is_timed_out:
            return self.with_last_words(f"was killed after {self.wall_s:.1f} s")
        return self.with_last_words(f"ended with status {self.exit_status}")

    def with_last_words(self, how: str) -> str:
        """``how`` it ended, and the end of what it said."""
        said = (self.stderr.strip() or self.stdout.strip())[-1_000:]
        return f"{how}: {said}" if said else how


class Sandbox:
    """A working folder in which commands run. Leaving it removes the folder::

        async with Sandbox() as sandbox:
            finished = await sandbox.run(["python", "-c", code], limits=Limits(wall_s=10))

    ``env`` is what every command finds beside ``HOME`` and ``TMPDIR`` (the folder) and ``INHERITED``; in a run that is
    traced also ``TRACEPARENT``, for spans of its own.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})
        self.folder: Path

    async def __aenter__(self) -> Self:
        self.folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="forebay-sandbox-"))
        return self

    async def __aexit__(self, *_: object) -> None:
        # Also when we are cancelled: nobody else removes the folder.
        await asyncio.shield(asyncio.to_thread(_remove, self.folder))

    async def run(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits = Limits(),
        stop: asyncio.Event | None = None,
        phase: str = "environment",
    ) -> Finished:
        """Run ``command`` to its end, or kill it at its limits, as soon as ``stop`` is set, or when we are cancelled.

        When this returns or raises, every process that the command started is gone, also those that made themselves a
        session of their own. Raises ``InvalidInput`` for a command that cannot be started. In a trace its time is a
        ``phase`` of the rollout for which it runs.
        """
        with span(phase) as recorded:
            finished = await self._run(command, stdin, env or {}, limits, stop)
            recorded.set(exit_status=finished.exit_status, cpu_s=finished.cpu_s)
        return finished

    async def _run(
        self, command: Command, stdin: bytes, env: Mapping[str, str], limits: Limits, stop: asyncio.Event | None
    ) -> Finished:
        spec = {
            "argv": _words(command),
            "folder": str(self.folder),
            "env": self._environment(env),
            "limits": limits.resources(),
            "wall_s": limits.wall_s,
        }
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                supervisor = await _start_supervisor(theirs)
            try:
                await _send(ours, msgspec.json.encode(spec) + b"\n")
                async with _hung_up_at(stop, ours):
                    return await _attend(supervisor, ours, stdin, limits.output_bytes)
            finally:
                # Hanging up is what makes the supervisor kill; it takes some milliseconds.
                ours.close()
                await _gone(supervisor)

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        return {**_inherited(), **own, **trace_environment(), **self._env, **extra}


def _inherited() -> dict[str, str]:
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def _words(command: Command) -> list[str]:
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise InvalidInput(f"a command is a line of shell or a list of words, got {command!r:.200}", field="command")
    return words


def shown(command: Command) -> str:
    """A command as one would type it."""
    return command if isinstance(command, str) else shlex.join(command)


async def _start_supervisor(theirs: socket.socket) -> Process:
    # A session of its own: what kills our process group must not kill the one that cleans up.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(SUPERVISOR), str(theirs.fileno())),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=_inherited(),
    )


async def _send(ours: socket.socket, spec: bytes) -> None:
    ours.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(ours, spec)


@asynccontextmanager
async def _hung_up_at(stop: asyncio.Event | None, ours: socket.socket) -> AsyncIterator[None]:
    async def hang_up(stop: asyncio.Event) -> None:
        await stop.wait()
        # Only our half: the supervisor kills what it started, and its answer arrives all the same.
        ours.shutdown(socket.SHUT_WR)

    waiting = asyncio.create_task(hang_up(stop)) if stop is not None else None
    try:
        yield
    finally:
        if waiting is not None:
            waiting.cancel()


async def _attend(supervisor: Process, ours: socket.socket, stdin: bytes, output_bytes: int) -> Finished:
    tail = Tail(output_bytes)
    stdout, stderr = Kept(output_bytes, tail), Kept(output_bytes, tail)
    async with asyncio.TaskGroup() as group:
        group.create_task(feed(supervisor.stdin, stdin))
        group.create_task(stdout.read(supervisor.stdout))
        group.create_task(stderr.read(supervisor.stderr))
        answer = group.create_task(_answer(ours))
    result = answer.result()
    if "error" in result:
        raise InvalidInput(result["error"], hint="see that it is installed where the run process runs", field="command")
    if result.get("num_left"):
        logger.warning("%d processes of a command could not be killed", result["num_left"])
    return Finished(
        exit_status=result["exit_status"],
        stdout=stdout.text(),
        stderr=stderr.text(),
        wall_s=result["wall_s"],
        cpu_s=result.get("cpu_s"),
        is_output_cut=stdout.is_cut or stderr.is_cut,
        printed=tail.text(),
    )


async def _answer(ours: socket.socket) -> dict[str, Any]:
    received = bytearray()
    while part := await asyncio.get_running_loop().sock_recv(ours, 65_536):
        received += part
    if not received:  # a command can kill its supervisor
        return {"exit_status": -9, "wall_s": 0.0}
    return dict(msgspec.json.decode(received))


async def _gone(supervisor: Process) -> None:
    # Also when we are cancelled once more meanwhile: its processes must be gone when we return.
    ending = asyncio.ensure_future(supervisor.wait())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise


def _remove(folder: Path) -> None:
    def unlock(function: Any, path: str, _: object) -> None:
        # A command may have taken the right to write from a folder of its own.
        with suppress(OSError):
            Path(path).parent.chmod(0o700)
            function(path)

    shutil.rmtree(folder, onerror=unlock)
