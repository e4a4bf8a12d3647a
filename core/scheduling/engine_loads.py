"""How many rollouts each engine of a run has, kept so that the least loaded one of ten thousand is found at once."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

_Rank = tuple[bool, int, int]

MAX_ORDERS = 8


class EngineLoads:
    """What policies are told of engines. The job keeps it; a policy only reads.

    ``num_places`` rollouts run at once. Engines have addresses without ``/v1``, as ``client.rollout.engine_url``.
    ``addresses`` are those that the run was given: an engine may not answer yet, and a router stands for several.
    """

    def __init__(self, num_places: int, urls: Iterable[str] = (), addresses: Iterable[str] = ()) -> None:
        self.addresses = tuple(addresses)
        self.num_places = num_places
        """Rollouts that may run at once, on all engines together."""
        self.may_begin = True
        """Whether a group may be begun: not while one waits for room in the buffer."""
        self.is_buffer_full = False
        """Whether one has waited so long for room that only groups which have begun can make some."""
        self.total = 0
        """Rollouts that run now, those without an engine included."""
        self.urls: tuple[str, ...] = ()
        """Engines that answer."""
        self._given: Iterable[str] | None = None
        """What ``urls`` were made of, if it cannot have changed since."""
        self._limits: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self._counts: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._num_asked = 0
        self._orders: dict[frozenset[str] | None, _LeastFirst] = {}
        self.set_engines(urls)

    @property
    def has_place(self) -> bool:
        """Whether fewer rollouts run than may at once."""
        return self.total < self.num_places

    def places(self, url: str | None) -> int:
        """The places of one engine: an equal share, unless each engine has a number of its own."""
        return self._limits.get(url or "", -(-self.num_places // max(1, len(self.urls))))

    def __contains__(self, url: object) -> bool:
        """Whether this engine answers."""
        return url in self._known

    def is_full(self, url: str) -> bool:
        """Whether an engine that has a number of places of its own has rollouts on all of them."""
        return url in self._limits and self.in_flight(url) >= self._limits[url]

    def in_flight(self, url: str | None) -> int:
        """Rollouts that run on an engine now."""
        return 0 if url is None else self._counts.get(url, 0)

    def least(self, among: frozenset[str] | None = None) -> str | None:
        """The engine with the fewest rollouts, of several the one not chosen for longest; None if none answers.

        Engines that have their own number of places, and rollouts on all of them, come last.
        ``among`` names those to choose from; the same set should be given again and again.
        """
        order = self._orders.get(among)
        if order is None:
            if len(self._orders) >= MAX_ORDERS:  # each is kept up to date, and engines come and go
                del self._orders[next(iter(self._orders))]
            order = self._orders[among] = _LeastFirst(self._rank, among)
            order.fill(self.urls)
        return order.first(self._known)

    # --- kept by the job

    def limit(self, limits: Mapping[str, int]) -> None:
        """Each engine has so many places from now on, and the run as many as they have together."""
        self._limits = dict(limits)
        self.num_places = max(1, sum(limits.values()))
        for order in self._orders.values():
            order.fill(self.urls)

    def set_engines(self, urls: Iterable[str]) -> Sequence[str]:
        """These engines answer now; returns those that do not any more."""
        if urls is self._given:  # asked for every rollout, of ten thousand engines perhaps
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
        """A rollout begins to run."""
        self.total += 1

    def leave(self) -> None:
        """It runs no more."""
        self.total -= 1

    def move(self, source: str | None, target: str | None) -> None:
        """A rollout goes from one engine to another; None for none."""
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
    """Engines by their load: a heap in which entries that are out of date are found when they come up."""

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
        if len(self._heap) > 4 * len(self._urls) + 64:  # what is out of date below the top is never found
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
