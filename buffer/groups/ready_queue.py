"""Which ready group goes out next, and which are made by old weights. Pure."""

import heapq
from collections.abc import Callable, Iterator


class ReadyQueue:
    """Ids of groups, by their place in the order of delivery and by their oldest weight version.

    Groups leave the ready state without a word: ``is_ready`` is asked about whatever comes up.
    """

    def __init__(self, is_ready: Callable[[str], bool]) -> None:
        self._is_ready = is_ready
        self._by_order: list[tuple[int, str]] = []
        self._queued: set[str] = set()
        """What is in ``_by_order``, so that nothing is there twice."""
        self._by_version: list[tuple[int, str]] = []

    def put(self, key: str, order: int) -> None:
        """Queue a group in its place."""
        if key not in self._queued:
            self._queued.add(key)
            heapq.heappush(self._by_order, (order, key))

    def take(self) -> Iterator[str]:
        """Ready groups, oldest first. The caller puts back those that it leaves ready."""
        while self._by_order:
            key = heapq.heappop(self._by_order)[1]
            self._queued.discard(key)
            if self._is_ready(key):
                yield key

    def note_version(self, key: str, version: int | None) -> None:
        """Note the oldest weight version of a group that is ready; None if that is not known."""
        if version is None:
            return
        # Groups leave it by being delivered, which it does not see: without a bound it would hold all that ever were.
        if len(self._by_version) > 2 * len(self._queued) + 64:
            self._by_version = [entry for entry in self._by_version if self._is_ready(entry[1])]
            heapq.heapify(self._by_version)
        heapq.heappush(self._by_version, (version, key))

    def take_older(self, version: int) -> list[str]:
        """The ready groups with a sample of older weights than ``version``; each is found once."""
        found: dict[str, None] = {}
        while self._by_version and self._by_version[0][0] < version:
            key = heapq.heappop(self._by_version)[1]
            if self._is_ready(key):
                found[key] = None
        return list(found)
