"""A child process with which its parent exchanges messages; ``parent_link`` is the child's side."""

import asyncio
import os
import signal
import socket
import subprocess
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from forebay.core.child_process import child_environment, end_session, python_argv, signal_group
from forebay.core.processes.parent_link import HEADER_BYTES, frame

MAX_MESSAGE_BYTES = 1 << 30
_ENDING_S = 2.0
"""How long a child that has hung up may take to end."""

Out = TypeVar("Out")


class ChildEnded(Exception):
    """The child has ended, or was killed because it sent something unreadable."""

    def __init__(self, code: int) -> None:
        """``code``: the exit code, or minus the signal."""
        super().__init__(f"exit code {code}" if code >= 0 else f"signal {-code}")
        self.code = code


class MessageTooLong(Exception):
    """A message of the child is longer than its parent takes."""


class ChildLink(Generic[Out]):
    """A module that runs in a process and a session of its own, and dies with this process.

    When it has ended, whatever is left of its session is killed. ``receive`` may be broken off only to kill the child.
    """

    def __init__(
        self,
        process: Process,
        sock: socket.socket,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        reads: type[Out],
        max_message_bytes: int,
    ) -> None:
        self._process = process
        self._sock = sock
        self._reader, self._writer = streams
        self._decode = msgspec.msgpack.Decoder(reads).decode
        self._max_message_bytes = max_message_bytes
        self._ended = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        setup: object,
        reads: type[Out] | Any,  # mypy takes no union for a type
        cwd: Path | None = None,
        env: Mapping[str, str] = {},
        stdout: int | None = subprocess.DEVNULL,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> Self:
        """Start ``module`` with ``arguments`` and send it ``setup``, its first message. Raises ``OSError``.

        ``env`` is added to this process's environment without the server's own token. Secrets belong into ``setup``:
        arguments and environments are seen by others.
        """
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            # Our copy of its end is closed at once, so that the child's death shows as the end of the socket.
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *python_argv(module, *arguments, str(theirs.fileno()), str(os.getpid())),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=[theirs.fileno(), *pass_fds],
                    cwd=cwd,
                    env={**child_environment(os.environ), **env},
                    # What it starts is killed with it, and Ctrl-C in a terminal is this process's business.
                    start_new_session=True,
                )
        except BaseException:
            writer.close()
            raise
        writer.write(frame(setup))
        return cls(process, ours, (reader, writer), reads, max_message_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def send(self, message: object) -> None:
        """Send a message, and wait while the child is slow to read. Nothing is raised if it has ended."""
        self._writer.write(frame(message))
        with suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> Out:
        """The next message. Raises ``ChildEnded`` or ``MessageTooLong``; the child is then gone, with its session."""
        try:
            return self._decode(await self._body())
        except MessageTooLong:
            await self.kill()
            raise
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError, RecursionError):
            raise ChildEnded(await self.end(_ENDING_S)) from None

    async def _body(self) -> bytearray:
        length = int.from_bytes(await self._reader.readexactly(HEADER_BYTES), "big")
        if length > self._max_message_bytes:
            raise MessageTooLong
        body = bytearray()
        while len(body) < length:  # in pieces: `readexactly` copies all of it at once, and the loop waits for that
            piece = await self._reader.read(length - len(body))
            if not piece:
                raise asyncio.IncompleteReadError(b"", length)
            body += piece
        return body

    def hang_up(self) -> None:
        """Send nothing more. The child sees the end of the socket; what it sends is still received."""
        if not self._writer.is_closing():  # as it is once a write has failed
            self._writer.write_eof()

    def signal(self, number: int) -> None:
        """Signal the process alone; one that has ended is no error."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, grace_s: float) -> int:
        """Wait ``grace_s`` for a child that was told to end, then kill it. The exit code, or minus the signal."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), grace_s)
        return await self.kill()

    async def kill(self) -> int:
        """Kill the process and its session; the exit code, or minus the signal. One that has ended is no error."""
        if self.is_alive:
            signal_group(self.pid, signal.SIGKILL)
        code = await self.ended()
        self._writer.close()
        return code

    async def ended(self) -> int:
        """Wait for the child and its session to end. The exit code, or minus the signal."""
        return await asyncio.shield(self._ended)

    async def _watch(self) -> int:
        code = await self._process.wait()
        # A program that it started may have its end open still. What the child has sent can be read after this.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        await asyncio.to_thread(end_session, self.pid)
        return code
