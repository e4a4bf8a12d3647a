"""A child process and its parent, which exchange messages over a socket pair.

A message is msgpack behind its length (8 bytes, big-endian). ``ChildProcess`` is the parent's side, ``ParentLink`` the
child's. What a child prints goes elsewhere, so users' code may print whatever it likes.
"""

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

from forebay.core.child_process import child_environment, die_with_parent, end_session, python_argv, signal_group

MAX_MESSAGE_BYTES = 1 << 30
_HEADER_BYTES = 8
_ENDING_S = 2.0
"""How long a child that has hung up may take to end."""

In = TypeVar("In")
Out = TypeVar("Out")


class ChildEnded(Exception):
    """The child has ended, or was killed because it sent something unreadable."""

    def __init__(self, code: int) -> None:
        """``code``: the exit code, or minus the signal."""
        super().__init__(f"exit code {code}" if code >= 0 else f"signal {-code}")
        self.code = code


class MessageTooLong(Exception):
    """A message of the child is longer than its parent takes."""


class ChildProcess(Generic[Out]):
    """A module that runs in a process and a session of its own, and dies with this process.

    When it has ended, whatever is left of its session is killed. ``receive`` may be broken off only to kill the child.
    """

    def __init__(self, process: Process, sock: socket.socket, reads: type[Out], max_message_bytes: int) -> None:
        self._process = process
        self._sock = sock
        self._decode = msgspec.msgpack.Decoder(reads).decode
        self._max_message_bytes = max_message_bytes
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
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
            ours.close()
            raise
        child = cls(process, ours, reads, max_message_bytes)
        child._reader, child._writer = await asyncio.open_connection(sock=ours)
        child._writer.write(_frame(setup))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def send(self, message: object) -> None:
        """Send a message, and wait while the child is slow to read. Nothing is raised if it has ended."""
        self._writer.write(_frame(message))
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
        length = int.from_bytes(await self._reader.readexactly(_HEADER_BYTES), "big")
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
        with suppress(OSError):
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


class ParentLink(Generic[In]):
    """The child's side. The last two of ``arguments`` are those that ``ChildProcess.start`` has added.

    From here on this process dies with its parent. Send and receive from one thread at a time.
    """

    def __init__(self, arguments: Sequence[str], reads: type[In] | Any) -> None:
        descriptor, parent_pid = map(int, arguments[-2:])
        die_with_parent(parent_pid)
        os.set_inheritable(descriptor, False)  # a program that users' code starts must not keep the socket open
        self._sock = socket.socket(fileno=descriptor)
        self._stream = self._sock.makefile("rb")
        self._decode = msgspec.msgpack.Decoder(reads).decode

    def receive(self) -> In:
        """The next message. Raises ``EOFError`` when the parent has hung up."""
        header = self._stream.read(_HEADER_BYTES)
        length = int.from_bytes(header, "big")
        body = self._stream.read(length)
        if len(header) < _HEADER_BYTES or len(body) < length:
            raise EOFError("the parent has hung up")
        return self._decode(body)  # type: ignore[no-any-return]

    def send(self, message: object) -> None:
        """Send a message. Raises ``OSError`` when the parent is gone."""
        self._sock.sendall(_frame(message))


def _frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_HEADER_BYTES, "big") + body
