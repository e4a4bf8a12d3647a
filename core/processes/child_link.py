"""The parent's side of messages with a child process; ``parent_link`` is the child's side."""

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
"""Seconds that a child may take to end after it closed its socket."""

Out = TypeVar("Out")


class ChildEnded(Exception):
    """The child has ended, or was killed because it sent an unreadable message."""

    def __init__(self, code: int) -> None:
        """``code``: the exit code, or minus the signal."""
        super().__init__(f"exit code {code}" if code >= 0 else f"signal {-code}")
        self.code = code


class MessageTooLong(Exception):
    """A child's message exceeds its parent's limit."""


class ChildLink(Generic[Out]):
    """A module that runs in its own process and session, and dies with this process.

    When it has ended, the rest of its session is killed. Cancel ``receive`` only to kill the child.
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
        reads: type[Out] | Any,  # mypy rejects a union as a type
        cwd: Path | None = None,
        env: Mapping[str, str] = {},
        stdout: int | None = subprocess.DEVNULL,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> Self:
        """Start ``module`` with ``arguments`` and send it ``setup``, its first message. Raises ``OSError``.

        ``env`` is added to this process's environment, without the server's token. Put secrets into ``setup``:
        other users can see arguments and environments.
        """
        ours, theirs = socket.socketpair()
        # Our copy of its end is closed once the child has it, so that the child's death closes the socket.
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *python_argv(module, *arguments, str(theirs.fileno()), str(os.getpid())),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=[theirs.fileno(), *pass_fds],
                    cwd=cwd,
                    env={**child_environment(os.environ), **env},
                    # Programs that it starts are killed with it, and Ctrl-C in a terminal reaches only this process.
                    start_new_session=True,
                )
            except BaseException:  # also a cancelled start: nothing else would close our end
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
        """Send a message, waiting while the child is slow to read. Raises nothing if it has ended."""
        self._writer.write(frame(message))
        with suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> Out:
        """Receive the next message. Raises ``ChildEnded`` or ``MessageTooLong``; child and session are then gone."""
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
        while len(body) < length:  # in pieces: `readexactly` copies everything at once, which blocks the loop
            piece = await self._reader.read(length - len(body))
            if not piece:
                raise asyncio.IncompleteReadError(b"", length)
            body += piece
        return body

    def hang_up(self) -> None:
        """Send nothing more. The child sees the end of the socket; its messages are still received."""
        if not self._writer.is_closing():  # it is closing once a write has failed
            self._writer.write_eof()

    def signal(self, number: int) -> None:
        """Signal only the process; ignores one that has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, grace_s: float) -> int:
        """Wait ``grace_s`` for a child that was told to end, then kill it; the exit code, or minus the signal."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), grace_s)
        return await self.kill()

    async def kill(self) -> int:
        """Kill the process and its session, if running. Returns the exit code, or minus the signal."""
        if self.is_alive:
            signal_group(self.pid, signal.SIGKILL)
        try:
            return await self.ended()
        finally:  # also for a caller that is cancelled
            self._writer.close()

    async def ended(self) -> int:
        """Wait for the child and its session to end. Returns the exit code, or minus the signal."""
        return await asyncio.shield(self._ended)

    async def _watch(self) -> int:
        code = await self._process.wait()
        # A program that it started may still have its end open. What the child has sent can be read after this.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        await asyncio.to_thread(end_session, self.pid)
        return code
