"""What a call of a ``MAP`` method gives: results as they finish, or all of them in order.

Its items are handed to workers as these become idle, and the results are kept until they are taken.
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
"""So many results may wait to be taken, for each worker, before no more input is pulled."""
_OF_INPUT = -1
"""Among the errors by rank: what pulling an item raised."""
SendItem = Callable[[Any, Callable[[Collection[int]], int]], RepeatedCall]
"""Sends one item to the worker that the function chooses."""


class MapFeed:
    """Everything here happens under the group's ``changed``, but for pulling and sending an item."""

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
        """Begin, in a thread of its own: pulling an item may take as long as it likes."""
        run = partial(contextvars.copy_context().run, self._run)
        threading.Thread(target=run, name=f"map {self._method}", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come, but for what waits to be taken."""
        return self._is_cancelled or (self._has_all and not self._in_flight)

    def take(self, timeout_s: float | None = None) -> tuple[int, Any] | None:
        """The next result, as soon as there is one; None after the last. Raises what an item failed with, once."""
        with self._changed:
            if not self._changed.wait_for(self._is_ready, timeout_s):
                raise TimeoutError(f"{self._method} has not ended in time, and goes on")
            return self._pop()

    async def taken(self) -> tuple[int, Any] | None:
        """The same, awaited."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._is_ready():
                    return self._pop()
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def cancel(self) -> bool:
        """Pull no more, and cancel what is in flight."""
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
        """Cancel it, for the garbage collector, which runs in any thread, and while that holds any lock."""
        if not self.has_ended:
            with suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(self.cancel, ())  # a ``Thread`` has locks of its own to take

    def _is_ready(self) -> bool:
        return bool(self._results) or self.has_ended

    def _pop(self) -> tuple[int, Any] | None:
        if self._is_cancelled:
            raise CancelledError
        if self._results:
            self._changed.notify_all()  # there may be room for another item
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
        except BaseException as raised:  # noqa: BLE001 - of the input, or a call among the arguments: its consumer's
            error = raised
        self._end({} if error is None else {_OF_INPUT: error})

    def _next_idle(self) -> int | None:
        workers = self._workers
        ranks = range(workers.world_size)
        with self._changed:
            while not (self._is_cancelled or self._has_all):
                if workers.is_closed:
                    self._errors[0] = WorkerError(f"{self._method} was ended: the group is closed")
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
        with self._changed:  # before its callback, which takes it out again, at once if it has ended
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
    """Gives ``(index, value)`` as they finish, by ``for`` or ``async for``; by ``get`` or ``await``, values in order.

    An item that fails ends it: no more input is pulled, and once what is in flight has ended, the error is raised.
    While more than two results for each worker wait to be taken, no input is pulled either. Whoever needs no more
    results may forget it, or ``cancel`` it.
    """

    def __init__(self, method: str, items: Iterable[Any], send: SendItem, workers: GroupWorkers) -> None:
        self._method = method
        self._values: dict[int, Any] = {}
        self._feed = MapFeed(method, _iterator(items, method), send, workers)
        # The feed lives as long as its thread: it has to hear that nobody can take its results any more.
        weakref.finalize(self, self._feed.forget).atexit = False
        self._feed.start()

    @property
    def done(self) -> bool:
        """Whether every item has ended, taken or not."""
        return self._feed.has_ended

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """The values of all items, but for those taken by iterating, in the order of the input.

        Raises ``TimeoutError`` if it takes longer, and then goes on.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if (taken := self._feed.take(left_s)) is None:
                return self._in_order()
            self._values[taken[0]] = taken[1]

    def cancel(self) -> bool:
        """Pull no more input, and cancel what is in flight. Whoever waits for results gets ``CancelledError``."""
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
            f"{method} goes over its first argument, and {type(items).__name__} cannot be iterated",
            field="0",
            hint="a list, a generator, or a call that gives one",
        ) from None
