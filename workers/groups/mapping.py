"""Results of a ``MAP`` call: as they finish, or all of them in order.

Items are sent to workers as these become idle, and results are kept until they are taken.
"""

import _thread
import asyncio
import contextvars
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.groups.call import GroupCall, error_of, materialized, one_error
from forebay.workers.groups.group_workers import GroupWorkers, RepeatedCall
from forebay.workers.members.worker_errors import WorkerError, WorkerLost

WAITING_PER_WORKER = 2
"""Untaken results, for each worker, above which no more input is pulled."""
_OF_INPUT = -1
"""Key among the errors by rank for the error of pulling an item."""
SendItem = Callable[[Any, Callable[[Collection[int]], int]], RepeatedCall]
"""Sends one item to the worker that the function chooses."""


class MapFeed:
    """Feeds items to workers. Works under the group's ``changed``, except when it pulls or sends an item."""

    def __init__(self, method: str, items: Iterator[Any], send: SendItem, workers: GroupWorkers) -> None:
        self._method, self._items, self._send, self._workers = method, items, send, workers
        self._changed = workers.changed
        self._results: deque[tuple[int, Any]] = deque()
        self._in_flight: dict[int, RepeatedCall] = {}
        self._errors: dict[int, BaseException] = {}
        self._has_all = False
        self._is_cancelled = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def start(self) -> None:
        """Start feeding, in a separate thread, since pulling an item may take any time."""
        run = partial(contextvars.copy_context().run, self._run)
        threading.Thread(target=run, name=f"map {self._method}", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether no further result will arrive; some may still wait to be taken."""
        return self._is_cancelled or (self._has_all and not self._in_flight)

    def take(self, timeout_s: float | None = None) -> tuple[int, Any] | None:
        """Wait for the next result; None after the last. Raises the error of a failed item, once."""
        with self._changed:
            if not self._changed.wait_for(self._is_ready, timeout_s):
                raise TimeoutError(f"{self._method} has not ended in time; it is still running")
            return self._pop()

    async def taken(self) -> tuple[int, Any] | None:
        """``take``, awaited."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._is_ready():
                    return self._pop()
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def cancel(self) -> bool:
        """Stop pulling items, and cancel calls in flight."""
        with self._changed:
            if self.has_ended:
                return False
            self._is_cancelled = True
            in_flight = list(self._in_flight.values())
            self._wake()
        for attempts in in_flight:
            attempts.outcome.cancel()
        return True

    def forget(self) -> None:
        """Cancel for the garbage collector, which may run in any thread, even one that holds a lock."""
        if not self.has_ended:
            with suppress(RuntimeError):  # the interpreter is exiting
                _thread.start_new_thread(self.cancel, ())  # starting a ``Thread`` takes locks

    def _is_ready(self) -> bool:
        return bool(self._results) or self.has_ended

    def _pop(self) -> tuple[int, Any] | None:
        if self._is_cancelled:
            raise CancelledError
        if self._results:
            self._changed.notify_all()  # there may now be room for another item
            return self._results.popleft()
        if errors := self._errors:
            self._errors = {}
            if (of_input := errors.get(_OF_INPUT)) is not None:
                raise of_input
            raise one_error(self._method, dict(sorted(errors.items())), self._workers.world_size)
        return None

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for index in itertools.count():
                if (rank := self._next_idle()) is None:
                    break
                self._send_item(index, materialized(next(self._items)), rank)
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001 - an error of the input or of an argument: passed to the consumer
            error = raised
        self._end({} if error is None else {_OF_INPUT: error})

    def _next_idle(self) -> int | None:
        workers = self._workers
        ranks = range(workers.world_size)
        with self._changed:
            while not (self._is_cancelled or self._has_all):
                if workers.is_closed:
                    self._errors[0] = WorkerError(f"{self._method} was cancelled: the group is closed")
                    return None
                if len(self._results) <= WAITING_PER_WORKER * workers.world_size:
                    if (idle := next(filter(workers.is_idle, ranks), None)) is not None:
                        return idle
                    lost = workers.lost
                    if len(lost) == workers.world_size and not self._in_flight:
                        self._errors[0] = WorkerLost(0, lost[0])
                        return None
                self._changed.wait()
        return None

    def _send_item(self, index: int, item: Any, rank: int) -> None:
        def choose(failed_on: Collection[int]) -> int:
            return self._workers.least_busy(failed_on) if failed_on else rank

        attempts = self._send(item, choose)
        with self._changed:  # before adding the callback, which removes it, at once if the call has ended
            self._in_flight[index] = attempts
        attempts.outcome.add_done_callback(partial(self._ended, index, attempts))
        if self._is_cancelled:
            attempts.outcome.cancel()

    def _ended(self, index: int, attempts: RepeatedCall, outcome: "Future[Any]") -> None:
        error = error_of(outcome)
        with self._changed:
            del self._in_flight[index]
            if error is None:
                self._results.append((index, outcome.result()))
            else:
                self._errors.setdefault(attempts.rank, error)
                self._has_all = True
            self._wake()

    def _end(self, errors: dict[int, BaseException]) -> None:
        with self._changed:
            self._errors.update(errors)
            self._has_all = True
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._is_ready():
            waiters, self._waiters = self._waiters, []
            for loop, waiter in waiters:
                with suppress(RuntimeError):  # its loop was closed
                    loop.call_soon_threadsafe(_set, waiter)


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class MapCall(GroupCall[list[Any]]):
    """Yields ``(index, value)`` as items finish (``for``, ``async for``). ``get`` and ``await`` return values in order.

    If an item fails, no more input is pulled, and the error is raised once calls in flight have ended. Pulling also
    pauses while more than two results for each worker wait to be taken. To stop early, ``cancel`` the call or drop
    all references to it.
    """

    def __init__(self, method: str, items: Iterable[Any], send: SendItem, workers: GroupWorkers) -> None:
        self._method = method
        self._values: dict[int, Any] = {}
        self._feed = MapFeed(method, _iterator(items, method), send, workers)
        # The feed's thread keeps it alive, so it must be notified that its results can no longer be taken.
        weakref.finalize(self, self._feed.forget).atexit = False
        self._feed.start()

    @property
    def done(self) -> bool:
        """Whether every item has ended, whether or not its result was taken."""
        return self._feed.has_ended

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Values of all items in input order, except those already taken by iterating.

        Raises ``TimeoutError`` after ``timeout_s``; the call continues.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if (taken := self._feed.take(left_s)) is None:
                return self._in_order()
            self._values[taken[0]] = taken[1]

    def cancel(self) -> bool:
        """Stop pulling input and cancel calls in flight. Waiting consumers get ``CancelledError``."""
        return self._feed.cancel()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while (taken := self._feed.take()) is not None:
            yield taken

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        while (taken := await self._feed.taken()) is not None:
            yield taken

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        async for index, value in self:
            self._values[index] = value
        return self._in_order()

    def _in_order(self) -> list[Any]:
        return [self._values[index] for index in sorted(self._values)]


def _iterator(items: Iterable[Any], method: str) -> Iterator[Any]:
    try:
        return iter(items)
    except TypeError:
        raise InvalidInput(
            f"{method} iterates over its first argument, and {type(items).__name__} cannot be iterated",
            field="0",
            hint="pass a list, a generator, or a call that returns one",
        ) from None
