"""Which ready group is delivered next, and which were made by old weights. Pure."""

import heapq
from collections.abc import Callable, Iterator


class ReadyQueue:
    """Group ids, by their position in the order of delivery and by their oldest weight version.

    Groups may stop being ready without notice, so ``is_ready`` is called for each candidate.
    """

    def __init__(self, is_ready: Callable[[str], bool]) -> None:
        self._is_ready = is_ready
        self._by_order: list[tuple[int, str]] = []
        self._queued: set[str] = set()
        """The keys in ``_by_order``, to prevent duplicates."""
        self._by_version: list[tuple[int, str]] = []

    def put(self, key: str, order: int) -> None:
        """Queue a group at its position."""
        if key not in self._queued:
            self._queued.add(key)
            heapq.heappush(self._by_order, (order, key))

    def take(self) -> Iterator[str]:
        """Take ready groups, oldest first. The caller puts back those that it leaves ready."""
        while self._by_order:
            key = heapq.heappop(self._by_order)[1]
            self._queued.discard(key)
            if self._is_ready(key):
                yield key

    def note_version(self, key: str, version: int | None) -> None:
        """Record the oldest weight version of a ready group; None if unknown."""
        if version is None:
            return
        # Delivered groups are not removed from this heap, so without a bound it would keep all groups for ever.
        if len(self._by_version) > 2 * len(self._queued) + 64:
            self._by_version = [entry for entry in self._by_version if self._is_ready(entry[1])]
            heapq.heapify(self._by_version)
        heapq.heappush(self._by_version, (version, key))

    def take_older(self, version: int) -> list[str]:
        """Ready groups with a sample from weights older than ``version``; each group is found once."""
        found: dict[str, None] = {}
        while self._by_version and self._by_version[0][0] < version:
            key = heapq.heappop(self._by_version)[1]
            if self._is_ready(key):
                found[key] = None
        return list(found)
