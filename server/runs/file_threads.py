"""Calls that touch files that users name: each in a thread of its own, so that one that never returns holds up nobody.

A file on a mount that is dead stops whoever asks for it, and nothing ends that thread. asyncio's own threads are few,
and waited for when the server ends.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from forebay.core.errors import InputRefused
from forebay.core.waiting import finish

ResultT = TypeVar("ResultT")
Parameters = ParamSpec("Parameters")

MAX_THREADS = 64
"""So many may be at work, or stuck, at once."""


class FileThreads:
    """Threads that the end of the process does not wait for. ``wait_s`` is how long one call may take."""

    def __init__(self, wait_s: float, max_threads: int = MAX_THREADS) -> None:
        self.wait_s = wait_s
        self._max_threads = max_threads
        self._num_threads = 0

    async def call(
        self, function: Callable[Parameters, ResultT], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> ResultT:
        """What ``function`` gives. Raises ``InputRefused`` if that takes too long; its thread is left to itself."""
        try:
            async with asyncio.timeout(self.wait_s):
                return await self.call_patiently(function, *args, **kwargs)
        except TimeoutError:
            raise InputRefused(
                f"what lies there does not answer within {self.wait_s:g} s",
                hint="see whether its disk or mount is alive; the server's setting input_wait_s says how long it waits",
                field="input_file",
            ) from None

    async def call_patiently(
        self, function: Callable[Parameters, ResultT], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> ResultT:
        """The same, for as long as it takes. Raises ``InputRefused`` where too many threads are stuck already."""
        if self._num_threads >= self._max_threads:
            raise InputRefused(
                f"{self._num_threads} input files are being read, or do not answer",
                hint="try again later; if it stays so, a mount from which starts read is dead",
                field="input_file",
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def end(result: object, error: Exception | None) -> None:
            self._num_threads -= 1
            finish(done, result, error)

        def run() -> None:
            result: object = None
            failure: Exception | None = None
            try:
                result = function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - it belongs to who waits
                failure = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end, result, failure)

        self._num_threads += 1
        self.leave(run)
        found: ResultT = await done
        return found

    def leave(self, function: Callable[[], object]) -> None:
        """Have ``function`` called, and nobody wait for it."""
        threading.Thread(target=function, name="forebay-file", daemon=True).start()
