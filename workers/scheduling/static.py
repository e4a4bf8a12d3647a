"""The baseline: each rollout is bound to an engine when its group is submitted, the engines in turn."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.waiting_groups import WaitingGroups


@dataclass(eq=False)
class _Bound:
    """One rollout, from its submission to its end. ``engine`` is None until it is bound, and once that is gone."""

    key: RolloutKey
    number: int
    """In the order in which they were submitted."""
    engine: str | None = None
    is_waiting: bool = True


@dataclass(eq=False)
class _Group:
    has_begun: bool
    rollouts: dict[int, _Bound]
    is_dealt: bool = False


@dataclass(eq=False)
class _Queue:
    """What is bound to one engine: heaps by number, in which entries that are out of date are found at the top."""

    begun: list[tuple[int, _Bound]] = field(default_factory=list)
    fresh: list[tuple[int, _Bound]] = field(default_factory=list)
    num_running: int = 0


class Static:
    """Every engine works through its own queue, with its share of the places, whatever the others do.

    Where an engine is lost, what was bound to it is dealt out to the others. An engine that comes later gets its part
    of what is submitted from then on.
    """

    concurrency = 1.0

    def __init__(self, inputs: PolicyInputs) -> None:
        self._waiting = WaitingGroups(inputs.window)
        self._groups: dict[str, _Group] = {}
        self._queues: dict[str, _Queue] = {}
        self._undealt: deque[str] = deque()
        """Groups of which no rollout is bound yet. That is done in turn, and no sooner than it makes a difference: what
        comes of it is the same, and a hundred thousand groups cost nobody a standstill."""
        self._unbound: list[tuple[int, _Bound]] = []
        """A heap by number: rollouts of other groups that have no engine."""
        self._num_submitted = 0
        self._num_dealt = 0
        self._loads = EngineLoads(0)
        self._places = 0, 0
        # Engines with a free place, by the number of what is first in their queues; as out of date as these.
        self._begun: list[tuple[int, str]] = []
        self._fresh: list[tuple[int, str]] = []

    def room(self) -> int:
        """Of ``Policy``, as all below."""
        return self._waiting.room

    def submit(self, group: WaitingGroup) -> None:
        rollouts = {}
        for number in group.numbers:
            self._num_submitted += 1
            rollouts[number] = _Bound(RolloutKey(group.group, number), self._num_submitted)
        self._groups[group.group] = _Group(group.is_open, rollouts)
        if group.is_open:
            self._unbound += [(bound.number, bound) for bound in rollouts.values()]  # later than all: still a heap
        else:
            self._waiting.submit(group)
            self._undealt.append(group.group)

    def next(self, loads: EngineLoads) -> NextRollout | None:
        if not loads.urls:
            return None
        places = loads.num_places, len(loads.urls)
        if places != self._places or len(self._begun) + len(self._fresh) > 16 * len(self._queues) + 256:
            self._loads, self._places = loads, places
            self._note_all()  # what is out of date below the top is never found
        self._deal(loads.urls)
        bound = self._first(self._begun, has_begun=True)
        if bound is None and loads.may_begin:
            bound = self._to_begin(loads.urls)
        return None if bound is None else self._start(bound)

    def _to_begin(self, urls: tuple[str, ...]) -> _Bound | None:
        """A rollout of a group that has not begun."""
        overdue = self._waiting.overdue
        if overdue is not None:
            while not self._groups[overdue.group].is_dealt:
                self._deal_group(urls)
            return self._first_of(overdue.group)
        first, num_dealt = self._first(self._fresh, has_begun=False), 0
        # Once around, an engine that has a place got something for it.
        while first is None and self._undealt and num_dealt < len(urls):
            num_dealt += self._deal_group(urls)
            first = self._first(self._fresh, has_begun=False)
        return first

    def _start(self, bound: _Bound) -> NextRollout:
        assert bound.engine is not None
        bound.is_waiting = False
        self._queues[bound.engine].num_running += 1
        group = self._groups[bound.key.group]
        if not group.has_begun:
            group.has_begun = True
            self._waiting.begin(bound.key.group)
            for sibling in group.rollouts.values():
                self._enqueue(sibling)
        self._note(bound.engine)
        return NextRollout(bound.key, bound.engine)

    # --- binding

    def _deal(self, urls: tuple[str, ...]) -> None:
        while self._unbound:
            self._bind(heapq.heappop(self._unbound)[1], urls)

    def _deal_group(self, urls: tuple[str, ...]) -> int:
        """Bind the rollouts of the next group; how many."""
        group = self._groups.get(self._undealt.popleft())
        if group is None or group.is_dealt or group.has_begun:  # it was closed, and may have come again
            return 0
        group.is_dealt = True
        for bound in group.rollouts.values():
            self._bind(bound, urls)
        return len(group.rollouts)

    def _bind(self, bound: _Bound, urls: tuple[str, ...]) -> None:
        if bound.is_waiting:
            bound.engine = urls[self._num_dealt % len(urls)]
            self._num_dealt += 1
            self._enqueue(bound)

    def _enqueue(self, bound: _Bound) -> None:
        """Put it into the queue of its engine, if it waits for one."""
        if bound.engine is None or not bound.is_waiting:
            return
        queue = self._queues.setdefault(bound.engine, _Queue())
        heap = queue.begun if self._groups[bound.key.group].has_begun else queue.fresh
        heapq.heappush(heap, (bound.number, bound))
        self._note(bound.engine)

    # --- what comes first

    def _first(self, order: list[tuple[int, str]], *, has_begun: bool) -> _Bound | None:
        """The rollout that was submitted first, of those whose engine has a place for it."""
        while order:
            number, url = order[0]
            head = self._head(url, has_begun=has_begun) if url in self._queues else None
            if head is None or not self._has_place(url):
                heapq.heappop(order)
            elif head.number == number:
                return head
            else:  # what was first there is gone with its group
                heapq.heapreplace(order, (head.number, url))
        return None

    def _head(self, url: str, *, has_begun: bool) -> _Bound | None:
        queue = self._queues[url]
        heap = queue.begun if has_begun else queue.fresh
        while heap:
            bound = heap[0][1]
            if bound.is_waiting and bound.engine == url and self._groups[bound.key.group].has_begun == has_begun:
                return bound
            heapq.heappop(heap)
        return None

    def _first_of(self, group: str) -> _Bound | None:
        """A rollout of a group that was passed over too often: all others wait until its engine has a place."""
        rollouts = self._groups[group].rollouts.values()
        return next((bound for bound in rollouts if bound.engine is not None and self._has_place(bound.engine)), None)

    def _has_place(self, url: str) -> bool:
        return self._queues[url].num_running < self._loads.places(url)

    def _note(self, url: str) -> None:
        """What is first in the queue of an engine, or whether that has a place, may have changed."""
        if not self._has_place(url):
            return
        for order, has_begun in ((self._begun, True), (self._fresh, False)):
            head = self._head(url, has_begun=has_begun)
            if head is not None:
                heapq.heappush(order, (head.number, url))

    def _note_all(self) -> None:
        self._begun.clear()
        self._fresh.clear()
        for url in self._queues:
            self._note(url)

    # --- what is told

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:  # noqa: ARG002 - how long it took changes nothing
        group = self._groups.get(rollout.group)
        bound = group.rollouts.pop(rollout.number, None) if group is not None else None
        if bound is not None and group is not None:
            self._leave(bound)
            if not group.rollouts:
                del self._groups[rollout.group]

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - none has a cap here
        self.lost(rollout)

    def lost(self, rollout: RolloutKey) -> None:
        group = self._groups.get(rollout.group)
        bound = group.rollouts.get(rollout.number) if group is not None else None
        if bound is None:
            return
        self._leave(bound)
        bound.is_waiting = True
        if bound.engine is None:
            heapq.heappush(self._unbound, (bound.number, bound))
        else:
            self._enqueue(bound)

    def closed(self, group: str) -> None:
        self._waiting.drop(group)
        gone = self._groups.get(group)
        for bound in gone.rollouts.values() if gone is not None else ():
            if bound.is_waiting:
                bound.is_waiting = False
            else:
                self._leave(bound)
        self._groups.pop(group, None)

    def _leave(self, bound: _Bound) -> None:
        """It runs no more: its place is free, unless its engine was lost meanwhile."""
        if not bound.is_waiting and bound.engine is not None and bound.engine in self._queues:
            self._queues[bound.engine].num_running -= 1
            self._note(bound.engine)

    def engine_lost(self, url: str) -> None:
        if self._queues.pop(url, None) is None:
            return
        for group in self._groups.values():
            for bound in group.rollouts.values():
                if bound.engine == url:
                    bound.engine = None
                    if bound.is_waiting:
                        heapq.heappush(self._unbound, (bound.number, bound))

    def begin_step(self, number: int) -> None:
        """Steps make no difference."""
