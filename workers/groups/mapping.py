"""What a call of a ``MAP`` method gives: results as they finish, or all of them in order."""

import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.groups.call import GroupCall
from forebay.workers.groups.group_workers import GroupWorkers
from forebay.workers.groups.map_feed import MapFeed, SendItem


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
