"""The server's side of a hook host: starts the host, sends requests, and kills and replaces it at the time limit."""

import asyncio
import contextlib
import copy
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.errors import ForebayError, HookFailed
from forebay.core.processes.child_link import MAX_MESSAGE_BYTES, ChildEnded, ChildLink, MessageTooLong
from forebay.core.tasks import TaskSet
from forebay.hooks import answer_checks, host_messages
from forebay.hooks.host_output import LIMIT_BYTES, HostOutput

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0


class StartFailures:
    """Remembers the last failure to set up a host, so that not every group has to wait for the same failure.

    The time until the next attempt doubles with each failure, from 1 s to a minute. What was missing may be there by
    then.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._error: HookFailed | None = None
        self._pause = Backoff(FIRST_WAIT_S, MAX_WAIT_S, is_exact=True)
        self._until_s = 0.0

    def check(self) -> None:
        """Raise the last failure if it is too early for another attempt."""
        if self._error is not None and self._now_s() < self._until_s:
            # A copy, because each raise adds to the traceback, and this error is raised for every group.
            raise copy.copy(self._error)

    def note(self, error: HookFailed) -> None:
        """Note a failed start."""
        self._error = error
        self._until_s = self._now_s() + self._pause.next_s()

    def clear(self) -> None:
        """Note a successful start."""
        self._error = None
        self._pause.reset()


_KEPT_OF_FAILURE = 64 << 10
"""Characters kept of each text about a failed hook, because these are journalled with its group."""
_CLOSE_GRACE_S = 2.0
_STANDARD_ERROR = 2

T = TypeVar("T")


class HostClient:
    """Runs one hook host and one request at a time.

    If a caller is cancelled, its request still completes and the answer is dropped, so that the host stays usable.
    After a failed set-up, requests fail at once with the same error until the next attempt is due.
    """

    def __init__(
        self,
        setup: host_messages.Setup,
        *,
        time_limit_s: float,
        start_limit_s: float,
        log_path: Path | None,
        log_limit_bytes: int = LIMIT_BYTES,
        max_answer_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._setup = setup
        self._max_answer_bytes = max_answer_bytes
        self._time_limit_s = time_limit_s
        self._start_limit_s = start_limit_s
        self._log_path = log_path
        self._log_limit_bytes = log_limit_bytes
        self._lock = asyncio.Lock()
        self._child: ChildLink[host_messages.FromHost] | None = None
        self._output: HostOutput | None = None
        self._tasks = TaskSet()
        self._failures = StartFailures(time.monotonic)
        self._refusal: ForebayError | None = None
        self._refusable: set[asyncio.Task[Any]] = set()
        self.hello: host_messages.Hello | None = None
        """The host's last report about itself; None until the first start."""

    async def ready(self, *, is_refusable: bool = False) -> host_messages.Hello:
        """Start the host unless it is running. Raises ``HookFailed`` if it cannot be set up."""
        work = self._start_locked()
        return await self._shielded(self._refusably(work) if is_refusable else work)

    async def ask(
        self, request: host_messages.Request, hook: str, *, is_refusable: bool = False
    ) -> host_messages.Reply:
        """Send a request to a running host. Raises ``HookFailed``, naming ``hook`` if the host has announced none."""
        work = self._ask_locked(request, hook)
        return await self._shielded(self._refusably(work) if is_refusable else work)

    @contextlib.contextmanager
    def refuse(self, error: ForebayError) -> Iterator[None]:
        """Inside this context, all current and new refusable requests raise ``error`` at once. Kills a busy host."""
        self._refusal = error
        # Waiting requests are cancelled as well: they would start as soon as the busy host is gone.
        for task in self._refusable:
            task.cancel()
        try:
            yield
        finally:
            self._refusal = None

    def decide(self, contract: str | None) -> None:
        """Keep the contract that an answer has shown, for hosts started later."""
        if contract is not None:
            self._setup = msgspec.structs.replace(self._setup, contract=contract)
            if self.hello is not None:
                self.hello = msgspec.structs.replace(self.hello, contract=contract)

    async def close(self) -> None:
        """End the host. It is killed with all its children after two seconds."""
        await self._tasks.cancel()
        if self._child is not None:
            self._child.hang_up()
            await self._end(_CLOSE_GRACE_S)

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._tasks.start(work)
        task.add_done_callback(_seen)
        # Shielded: an interrupted request would require a new host, so it completes without its caller.
        return await asyncio.shield(task)

    async def _refusably(self, work: Coroutine[Any, Any, T]) -> T:
        if self._refusal is not None:
            # Closed, because Python warns about coroutines that are never awaited.
            work.close()
            raise copy.copy(self._refusal)
        task = asyncio.current_task()
        assert task is not None
        self._refusable.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            # In this case ``close`` cancelled it, not ``refuse``.
            if self._refusal is None:
                raise
            raise copy.copy(self._refusal) from None
        finally:
            self._refusable.discard(task)

    async def _start_locked(self) -> host_messages.Hello:
        async with self._lock:
            return await self._running()

    async def _ask_locked(self, request: host_messages.Request, hook: str) -> host_messages.Reply:
        async with self._lock:
            await self._running()
            assert self._child is not None
            await self._child.send(request)
            return await self._reply(host_messages.REPLIES[type(request)], self._time_limit_s, hook)

    async def _running(self) -> host_messages.Hello:
        if self._child is None or not self._child.is_alive or self.hello is None:
            self._failures.check()
            try:
                self.hello = await self._started()
            except HookFailed as error:
                self._failures.note(error)
                raise
            self._failures.clear()
        return self.hello

    async def _started(self) -> host_messages.Hello:
        await self._end()
        try:
            self._child = await self._start_child()
        except OSError as error:
            raise answer_checks.failure("host", f"it could not be started: {error}") from error
        culprit = f"file {Path(self._setup.module_path).name}" if self._setup.module_path else "plugins"
        try:
            return await self._reply(host_messages.Hello, self._start_limit_s, culprit)
        except HookFailed:
            await self._end()
            raise

    async def _start_child(self) -> ChildLink[host_messages.FromHost]:
        written = _STANDARD_ERROR
        if self._log_path is not None:
            self._output = await HostOutput.open(self._log_path, self._log_limit_bytes)
            written = self._output.writer
        try:
            return await ChildLink.start(
                "forebay.hooks.host",
                setup=self._setup,
                reads=host_messages.FromHost,
                stdout=written,
                stderr=written,
                max_message_bytes=self._max_answer_bytes,
            )
        finally:
            if self._output is not None:
                os.close(self._output.writer)

    async def _end(self, grace_s: float = 0.0) -> None:
        """End the host, if there is one, and store all of its output."""
        if self._child is not None:
            await self._child.end(grace_s)
        if self._output is not None:
            await self._output.close()
        self._child = self._output = None

    async def _reply(self, kind: type[T], limit_s: float, hook: str) -> T:
        """Wait for the host's answer. A host that times out or dies is killed, and the hook's name is reported."""
        assert self._child is not None
        asked = hook  # reported unless the host announces the hook that it calls
        try:
            async with asyncio.timeout(limit_s):
                # The host sends announcements of hooks before the reply.
                while isinstance(message := await self._child.receive(), host_messages.Asking):
                    asked = message.hook[:_KEPT_OF_FAILURE]
        except TimeoutError:
            await self._end()
            raise answer_checks.failure(asked, f"it took longer than {limit_s:g} s") from None
        except MessageTooLong:
            await self._end()
            what = f"its answer is longer than max_hook_answer_bytes ({self._max_answer_bytes})"
            raise answer_checks.failure(asked, what) from None
        except ChildEnded as ended:
            await self._end()
            raise answer_checks.failure(asked, f"its process died ({ended})") from None
        except asyncio.CancelledError:
            # A host that still works on this request is unusable: its answer would be mistaken for the next.
            await self._end()
            raise
        if isinstance(message, host_messages.Failed):
            raise HookFailed(*(text[-_KEPT_OF_FAILURE:] for text in (message.hook, message.message, message.traceback)))
        if not isinstance(message, kind):
            await self._end()
            raise answer_checks.failure(asked, f"its process sent an unexpected {type(message).__name__}")
        return message


def _seen(task: asyncio.Task[Any]) -> None:
    # The caller may be gone, and asyncio warns about exceptions that were never retrieved.
    if not task.cancelled():
        task.exception()
