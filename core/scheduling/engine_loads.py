"""Counts each engine's rollouts so that the least loaded of ten thousand engines is found at once."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

_Rank = tuple[bool, int, int]

MAX_ORDERS = 8


class EngineLoads:
    """The engines and their load, for policies. The job updates it; a policy only reads.

    ``num_places`` rollouts run at once. Engines have addresses without ``/v1``, as in ``client.rollout.engine_url``.
    ``addresses`` are those given to the run: an engine may not answer yet, and a router stands for several.
    """

    def __init__(self, num_places: int, urls: Iterable[str] = (), addresses: Iterable[str] = ()) -> None:
        self.addresses = tuple(addresses)
        self.num_places = num_places
        """Maximum number of rollouts at once on all engines together."""
        self.may_begin = True
        """Whether a group may be started; false while one waits for room in the buffer."""
        self.is_buffer_full = False
        """Set after a long wait for room: only groups that have started can free some."""
        self.total = 0
        """Number of running rollouts, including those without an engine."""
        self.urls: tuple[str, ...] = ()
        """Engines that respond."""
        self._given: Iterable[str] | None = None
        """The argument from which ``urls`` was made, if it is immutable."""
        self._limits: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self._counts: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._num_asked = 0
        self._orders: dict[frozenset[str] | None, _LeastFirst] = {}
        self.set_engines(urls)

    @property
    def has_place(self) -> bool:
        """Whether another rollout may run."""
        return self.total < self.num_places

    def places(self, url: str | None) -> int:
        """Number of slots of one engine: an equal share, unless engines have their own limits."""
        return self._limits.get(url or "", -(-self.num_places // max(1, len(self.urls))))

    def __contains__(self, url: object) -> bool:
        """Whether this engine responds."""
        return url in self._known

    def is_full(self, url: str) -> bool:
        """Whether an engine with its own limit has a rollout in every slot."""
        return url in self._limits and self.in_flight(url) >= self._limits[url]

    def in_flight(self, url: str | None) -> int:
        """Number of rollouts running on an engine."""
        return 0 if url is None else self._counts.get(url, 0)

    def least(self, among: frozenset[str] | None = None) -> str | None:
        """The engine with the fewest rollouts; among equals, the least recently chosen. None if none responds.

        Engines that have reached their own limit come last.
        ``among`` restricts the choice; pass the same set repeatedly, because each set has its own heap.
        """
        order = self._orders.get(among)
        if order is None:
            if len(self._orders) >= MAX_ORDERS:  # each must be kept up to date, and engines change
                del self._orders[next(iter(self._orders))]
            order = self._orders[among] = _LeastFirst(self._rank, among)
            order.fill(self.urls)
        return order.first(self._known)

    # --- called by the job

    def limit(self, limits: Mapping[str, int]) -> None:
        """Set the number of slots of each engine; the run has their sum."""
        self._limits = dict(limits)
        self.num_places = max(1, sum(limits.values()))
        for order in self._orders.values():
            order.fill(self.urls)

    def set_engines(self, urls: Iterable[str]) -> Sequence[str]:
        """Set the engines that respond; returns those that no longer do."""
        if urls is self._given:  # called for every rollout, possibly with ten thousand engines
            return ()
        self._given = urls if isinstance(urls, tuple) else None
        before, self.urls = self.urls, tuple(dict.fromkeys(urls))
        if before == self.urls:
            return ()
        self._known = frozenset(self.urls)
        for order in self._orders.values():
            order.fill(self.urls)
        return [url for url in before if url not in self._known]

    def enter(self) -> None:
        """Count a rollout that starts."""
        self.total += 1

    def leave(self) -> None:
        """Count a rollout that ends."""
        self.total -= 1

    def move(self, source: str | None, target: str | None) -> None:
        """Move a rollout from one engine to another; None means no engine."""
        if source is not None:
            self._count(source, -1)
        if target is not None:
            self._num_asked += 1
            self._asked[target] = self._num_asked
            self._count(target, 1)

    def _count(self, url: str, change: int) -> None:
        self._counts[url] = self._counts.get(url, 0) + change
        for order in self._orders.values():
            order.note(url)

    def _rank(self, url: str) -> _Rank:
        return self.is_full(url), self.in_flight(url), self._asked.get(url, 0)


class _LeastFirst:
    """Engines by load: a heap whose outdated entries are dropped when they reach the top."""

    def __init__(self, rank: Callable[[str], _Rank], among: frozenset[str] | None) -> None:
        self._rank, self._among = rank, among
        self._urls: list[str] = []
        self._heap: list[tuple[_Rank, str]] = []

    def fill(self, urls: Iterable[str]) -> None:
        self._urls = [url for url in urls if self._among is None or url in self._among]
        self._heap = [(self._rank(url), url) for url in self._urls]
        heapq.heapify(self._heap)

    def note(self, url: str) -> None:
        if self._among is not None and url not in self._among:
            return
        if len(self._heap) > 4 * len(self._urls) + 64:  # outdated entries below the top are never dropped
            self.fill(self._urls)
        else:
            heapq.heappush(self._heap, (self._rank(url), url))

    def first(self, known: frozenset[str]) -> str | None:
        while self._heap:
            rank, url = self._heap[0]
            if url in known and rank == self._rank(url):
                return url
            heapq.heappop(self._heap)
        return None
