"""The server's end of a hook host: starts it, asks it, kills it at the time limit, starts another."""

import asyncio
import contextlib
import copy
import os
import signal
import socket
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.child_process import child_environment, end_session, python_argv
from forebay.core.errors import ForebayError, HookFailed
from forebay.core.tasks import TaskSet
from forebay.hooks import answer_checks, host_messages
from forebay.hooks.host_output import LIMIT_BYTES, HostOutput

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0


class StartFailures:
    """The last failure to set up a host, which would repeat itself for every group, and slowly.

    It is remembered for a time that doubles with each further one, from 1 s to a minute: what was missing may be there
    by the next try.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._error: HookFailed | None = None
        self._pause = Backoff(FIRST_WAIT_S, MAX_WAIT_S, is_exact=True)
        self._until_s = 0.0

    def check(self) -> None:
        """Raise the last failure while it is too early for another try."""
        if self._error is not None and self._now_s() < self._until_s:
            # A copy: each raise adds its own traceback, and this error is raised for every group.
            raise copy.copy(self._error)

    def note(self, error: HookFailed) -> None:
        """A start failed."""
        self._error = error
        self._until_s = self._now_s() + self._pause.next_s()

    def clear(self) -> None:
        """A start succeeded."""
        self._error = None
        self._pause.reset()


MAX_ANSWER_BYTES = 1 << 30
"""The default of the setting ``max_hook_answer_bytes``."""
_KEPT_OF_FAILURE = 64 << 10
"""Characters of each text about a failed hook: they are journalled with its group."""
_CLOSE_GRACE_S = 2.0
_STANDARD_ERROR = 2

T = TypeVar("T")


class HostClient:
    """One hook host at a time, one request at a time.

    A request that has begun goes on when its caller is cancelled: its answer is dropped, the host stays usable. A host
    that could not be set up is left alone for a while; until then each request gets the same failure at once.
    """

    def __init__(
        self,
        setup: host_messages.Setup,
        *,
        time_limit_s: float,
        start_limit_s: float,
        log_path: Path | None,
        log_limit_bytes: int = LIMIT_BYTES,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._setup = setup
        self._max_answer_bytes = max_answer_bytes
        self._time_limit_s = time_limit_s
        self._start_limit_s = start_limit_s
        self._log_path = log_path
        self._log_limit_bytes = log_limit_bytes
        self._lock = asyncio.Lock()
        self._child: _Child | None = None
        self._tasks = TaskSet()
        self._failures = StartFailures(time.monotonic)
        self._refusal: ForebayError | None = None
        self._refusable: set[asyncio.Task[Any]] = set()
        self.hello: host_messages.Hello | None = None
        """What the host last said of itself; None until it has been started once."""

    async def ready(self, *, is_refusable: bool = False) -> host_messages.Hello:
        """Start the host unless one runs. Raises ``HookFailed`` when it cannot be set up."""
        work = self._start_locked()
        return await self._shielded(self._refusably(work) if is_refusable else work)

    async def ask(
        self, request: host_messages.Request, hook: str, *, is_refusable: bool = False
    ) -> host_messages.Reply:
        """Send a request to a running host. Raises ``HookFailed``; ``hook`` is named if none was asked until then."""
        work = self._ask_locked(request, hook)
        return await self._shielded(self._refusably(work) if is_refusable else work)

    @contextlib.contextmanager
    def refuse(self, error: ForebayError) -> Iterator[None]:
        """Within this, whoever asks, or has asked, and is refusable gets ``error`` at once; a busy host is killed."""
        self._refusal = error
        # Those that wait for the lock are cancelled as well: they would begin as soon as the busy one is gone.
        for task in self._refusable:
            task.cancel()
        try:
            yield
        finally:
            self._refusal = None

    def decide(self, contract: str | None) -> None:
        """Keep the contract that an answer has shown, so that a host started later knows it."""
        if contract is not None:
            self._setup = msgspec.structs.replace(self._setup, contract=contract)
            if self.hello is not None:
                self.hello = msgspec.structs.replace(self.hello, contract=contract)

    async def close(self) -> None:
        """End the host: it may finish for two seconds, then it is killed with all that it started."""
        await self._tasks.cancel()
        if self._child is not None:
            await self._child.close()

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._tasks.start(work)
        task.add_done_callback(_seen)
        # Broken off in the middle, a request would cost the host: it goes on without its caller.
        return await asyncio.shield(task)

    async def _refusably(self, work: Coroutine[Any, Any, T]) -> T:
        if self._refusal is not None:
            # Python warns of a coroutine that nobody awaits.
            work.close()
            raise copy.copy(self._refusal)
        task = asyncio.current_task()
        assert task is not None
        self._refusable.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            # Cancelled by ``close`` then, and not by ``refuse``.
            if self._refusal is None:
                raise
            raise copy.copy(self._refusal) from None
        finally:
            self._refusable.discard(task)

    async def _start_locked(self) -> host_messages.Hello:
        async with self._lock:
            return (await self._running())[1]

    async def _ask_locked(self, request: host_messages.Request, hook: str) -> host_messages.Reply:
        async with self._lock:
            child = (await self._running())[0]
            return await self._within(child, child.ask(request), self._time_limit_s, hook)

    async def _running(self) -> "tuple[_Child, host_messages.Hello]":
        if self._child is None or not self._child.is_alive or self.hello is None:
            self._failures.check()
            try:
                self._child, self.hello = await self._started()
            except HookFailed as error:
                self._failures.note(error)
                raise
            self._failures.clear()
        return self._child, self.hello

    async def _started(self) -> "tuple[_Child, host_messages.Hello]":
        child = await _Child.start(self._log_path, self._log_limit_bytes, self._max_answer_bytes)
        culprit = f"file {Path(self._setup.module_path).name}" if self._setup.module_path else "plugins"
        try:
            return child, await self._within(child, child.greet(self._setup), self._start_limit_s, culprit)
        except HookFailed:
            await child.kill()
            raise

    async def _within(self, child: "_Child", work: Coroutine[Any, Any, T], limit_s: float, hook: str) -> T:
        """``work``, unless it takes longer than ``limit_s`` or the child dies: then the child is killed and blamed."""
        # Whom to blame until the host names the hook that it is calling.
        child.asked = hook
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            await child.kill()
            raise answer_checks.failure(child.asked, f"it took longer than {limit_s:g} s") from None
        except _AnswerTooLong:
            await child.kill()
            what = f"its answer is longer than max_hook_answer_bytes ({self._max_answer_bytes})"
            raise answer_checks.failure(child.asked, what) from None
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError, RecursionError):
            code = await child.ended()  # the socket's end is seen before the process's
            ending = f"exit code {code}" if code >= 0 else f"signal {-code}"
            raise answer_checks.failure(child.asked, f"its process died ({ending})") from None
        except asyncio.CancelledError:
            # A host in the middle of a request cannot be asked anything else: its answer would be taken for the next.
            await child.kill()
            raise


class _AnswerTooLong(Exception):
    """A message of the host is longer than the server takes."""


class _Child:
    """A started host process."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: HostOutput | None,
        max_answer_bytes: int,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = output
        self._max_answer_bytes = max_answer_bytes
        self._exited = asyncio.create_task(self._watch())
        self.asked = ""
        """The hook that the host has said it is calling."""

    @classmethod
    async def start(cls, log_path: Path | None, log_limit_bytes: int, max_answer_bytes: int) -> Self:
        """Start a host in a session of its own, with one end of a socket pair."""
        ours, theirs = socket.socketpair()
        try:
            # Our copy of its end is closed at once, so that the host's death shows as the end of the socket.
            with theirs:
                output = await HostOutput.open(log_path, log_limit_bytes) if log_path else None
                process = await _start_process(theirs, output)
        except OSError as error:
            ours.close()
            raise answer_checks.failure("host", f"it could not be started: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer, output, max_answer_bytes)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return not self._exited.done() and self._process.returncode is None

    async def greet(self, setup: host_messages.Setup) -> host_messages.Hello:
        """Hand over the setup; the host's hello comes once users' code is loaded."""
        self._writer.write(host_messages.frame(setup))
        reply = await self._reply()
        if not isinstance(reply, host_messages.Hello):
            raise OSError("the hook host spoke out of turn")
        return reply

    async def ask(self, request: host_messages.Request) -> host_messages.Reply:
        """One request, one reply."""
        self._writer.write(host_messages.frame(request))
        await self._writer.drain()
        reply = await self._reply()
        if type(reply) is not host_messages.REPLIES[type(request)]:
            raise OSError("the hook host spoke out of turn")
        return reply

    async def kill(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._exited

    async def close(self) -> None:
        """Close the socket, which ends the host, and kill it if it does not end."""
        self._writer.close()
        await self.ended()

    async def ended(self) -> int:
        """The exit code of a process that should end at any moment, or minus the signal; killed if it does not."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), _CLOSE_GRACE_S)
        await self.kill()
        return self._process.returncode or 0

    async def _reply(self) -> host_messages.Hello | host_messages.Reply:
        while True:
            header = await self._reader.readexactly(host_messages.HEADER_BYTES)
            if (length := host_messages.body_length(header)) > self._max_answer_bytes:
                raise _AnswerTooLong
            body = bytearray()
            while len(body) < length:  # in pieces: `readexactly` copies all of it at once, and the loop waits for that
                piece = await self._reader.read(length - len(body))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", length)
                body += piece
            message: host_messages.FromHost = host_messages.decode_from_host(body)
            if isinstance(message, host_messages.Failed):
                kept = (text[-_KEPT_OF_FAILURE:] for text in (message.hook, message.message, message.traceback))
                raise HookFailed(*kept)
            # Announcements come before the reply, as many as hooks are called.
            if not isinstance(message, host_messages.Asking):
                return message
            self.asked = message.hook[:_KEPT_OF_FAILURE]

    async def _watch(self) -> None:
        await self._process.wait()
        # A program that the host started may have the other end open: nobody would see that the host is gone.
        self._writer.transport.abort()
        await asyncio.to_thread(end_session, self._process.pid)
        if self._output is not None:
            await self._output.close()


async def _start_process(theirs: socket.socket, output: HostOutput | None) -> Process:
    written = _STANDARD_ERROR if output is None else output.writer
    try:
        return await asyncio.create_subprocess_exec(
            *python_argv("forebay.hooks.host", str(theirs.fileno()), str(os.getpid())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            env=child_environment(os.environ),
            # A session of its own: what users' hooks start is killed with it.
            start_new_session=True,
        )
    finally:
        if output is not None:
            os.close(output.writer)


def _seen(task: asyncio.Task[Any]) -> None:
    # Nobody may be waiting for it any more, and asyncio complains of errors at which nobody looked.
    if not task.cancelled():
        task.exception()
