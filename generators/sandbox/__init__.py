"""Runs commands of agents, tools and verifiers in their own folder, with limits, and leaves no process behind.

``supervisor`` is the program that starts each command in its own process tree and ends the whole tree. ``output`` keeps
the beginning and the end of a command's output.

The sandbox contains runaway programs. It does not protect against malicious programs, which need a container or
another machine.
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
"""Environment variables that commands inherit. Others may hold keys of the trainer or the cluster."""

Command = str | Sequence[str]
"""A list of words, or a shell line for ``/bin/sh``."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a command. ``cpu_s``, ``memory_bytes`` and ``file_bytes`` apply to each process separately.

    ``memory_bytes`` limits the address space, of which some programs (Node, Java) reserve far more than they use.
    """

    wall_s: float = 60.0
    cpu_s: int | None = None
    memory_bytes: int | None = None
    file_bytes: int | None = None
    output_bytes: int = 65_536
    """Bytes kept of each output, half from its beginning and half from its end. The rest is discarded."""

    def __post_init__(self) -> None:
        given = (self.wall_s, self.cpu_s, self.memory_bytes, self.file_bytes, self.output_bytes)
        if not all(0 < value < float("inf") for value in given if value is not None):
            raise InvalidInput(f"each limit of a command must be more than 0 (got {self})", field="limits")

    def resources(self) -> dict[str, int]:
        """Return the limits by their names in the module ``resource``."""
        given = {"RLIMIT_CPU": self.cpu_s, "RLIMIT_AS": self.memory_bytes, "RLIMIT_FSIZE": self.file_bytes}
        return {"RLIMIT_CORE": 0, **{name: int(value) for name, value in given.items() if value is not None}}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Result of a command. ``exit_status`` is negative for a signal, and None if it was killed at its time limit."""

    exit_status: int | None
    stdout: str
    stderr: str
    wall_s: float
    is_output_cut: bool
    cpu_s: float | None = None
    """CPU time of all its processes; None if the command killed its supervisor, which measures it."""
    printed: str = ""
    """The last ``output_bytes`` of both outputs together, in the order of arrival."""

    @property
    def is_timed_out(self) -> bool:
        return self.exit_status is None

    @property
    def problem(self) -> str:
        """Description of a failure, with the end of the output; empty for success."""
        if self.exit_status == 0:
            return ""
        if self.is_timed_out:
            return self.with_last_words(f"was killed after {self.wall_s:.1f} s")
        return self.with_last_words(f"ended with status {self.exit_status}")

    def with_last_words(self, how: str) -> str:
        """Return ``how`` the command ended, with the end of its output."""
        said = (self.stderr.strip() or self.stdout.strip())[-1_000:]
        return f"{how}: {said}" if said else how


class Sandbox:
    """A working folder in which commands run. Leaving the context removes the folder::

        async with Sandbox() as sandbox:
            finished = await sandbox.run(["python", "-c", code], limits=Limits(wall_s=10))

    Every command gets the environment ``env``, ``INHERITED``, and the folder as ``HOME`` and ``TMPDIR``. In a traced
    run it also gets ``TRACEPARENT`` for its own spans.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})
        self.folder: Path

    async def __aenter__(self) -> Self:
        self.folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="forebay-sandbox-"))
        return self

    async def __aexit__(self, *_: object) -> None:
        # Shielded, so that the folder is removed even if we are cancelled.
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
        """Run ``command`` to its end; kill it at its limits, when ``stop`` is set, or when this task is cancelled.

        When this returns or raises, all processes of the command are gone, including those in new sessions. Raises
        ``InvalidInput`` if the command cannot be started. Its time is traced as a ``phase`` of the rollout.
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
                # Closing the socket makes the supervisor kill the command, within milliseconds.
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
        raise InvalidInput(f"a command must be a shell line or a list of words (got {command!r:.200})", field="command")
    return words


def shown(command: Command) -> str:
    """Return a command as a shell line."""
    return command if isinstance(command, str) else shlex.join(command)


async def _start_supervisor(theirs: socket.socket) -> Process:
    # In its own session: a kill of our process group must not kill the process that cleans up.
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
        # Only our half is closed: the supervisor kills the command, and its answer can still arrive.
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
        raise InvalidInput(result["error"], hint="install it on the machine of the run process", field="command")
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
    # Its processes must be gone when we return, even if we are cancelled again.
    ending = asyncio.ensure_future(supervisor.wait())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise


def _remove(folder: Path) -> None:
    def unlock(function: Any, path: str, _: object) -> None:
        # The command may have made a folder read-only. What is above the sandbox's folder is not ours to change.
        with suppress(OSError):
            (folder if Path(path) == folder else Path(path).parent).chmod(0o700)
            function(path)

    shutil.rmtree(folder, onerror=unlock)
