"""The groups that a run process is filling: how long each may still take, and what happens when one closes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from forebay.core.active_clock import ActiveClock
from forebay.core.ids import group_id, group_rid_prefix
from forebay.core.signal import Signal
from forebay.generators.schedule import GroupKey, GroupPlan, Plan

Call = tuple[str, str]
"""A call in flight: the server's address and the call's ``rid``."""


class GroupClosed(BaseException):
    """Raised by a rollout's client: the group is closed, the rollout is of no use any more.

    Like ``asyncio.CancelledError`` no ``Exception``, so that a rollout function that retries on errors ends too.
    """


class OpenGroup:
    """One group between the announcement of its first rollout and the end of its last."""

    def __init__(self, plan: Plan, group: GroupPlan, clock: ActiveClock) -> None:
        self.key: GroupKey = (group.row.instance_id, group.epoch)
        self.row = group.row
        self.epoch = group.epoch
        self.slots = group.slots
        self.group_id = group_id(*self.key)
        self.rid_prefix = group_rid_prefix(plan.run_id, self.group_id)
        self.is_finished = False
        """Its last rollout has ended, or it is closed."""
        self._news = Signal()
        self._is_closed = threading.Event()
        self._num_left = len(group.slots)
        self._clock = clock
        self._timeout_s = plan.group_timeout_s
        self._deadline_s = self._ends_s = clock.now_s() + plan.group_deadline_s
        self._tasks: dict[asyncio.Task[object], int] = {}
        self._calls: set[Call] = set()
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Nothing that is generated for it now would be used."""
        return self._is_closed.is_set()

    def left_s(self) -> float:
        """Seconds until it is closed unless another sample comes; 0 once it is."""
        return 0.0 if self.is_closed else max(0.0, self._ends_s - self._clock.now_s())

    def note_sample(self) -> None:
        """A sample was finished: the group's time-out begins again, within its deadline."""
        self._ends_s = min(self._deadline_s, self._clock.now_s() + self._timeout_s)
        self._news.notify()

    async def wait_expired(self) -> bool:
        """Wait until its time is up (true), or it is finished before."""
        while not self.is_finished and (left_s := self.left_s()):
            # The clock may stand still meanwhile, and a sample may move the end either way: it is asked again.
            await self._news.wait(max(left_s, 0.05))
        return not self.is_finished

    def note_rollout_ended(self) -> None:
        """One of its rollouts has ended, in whatever way."""
        self._num_left -= 1
        if not self._num_left:
            self._finish()

    def _finish(self) -> None:
        self.is_finished = True
        self._news.notify()

    @contextmanager
    def working(self) -> Iterator[None]:
        """The current task works for this group: it is cancelled when the group closes. May be nested."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = self._tasks.get(task, 0) + 1
        try:
            yield
        finally:
            self._tasks[task] -= 1
            if not self._tasks[task]:
                del self._tasks[task]

    @contextmanager
    def in_flight(self, call: Call) -> Iterator[None]:
        """A call of this group is on its way. Also used from the threads of rollout functions."""
        with self._lock:
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def calls(self) -> list[Call]:
        """The calls that were sent and not answered."""
        with self._lock:
            return list(self._calls)

    def close(self) -> None:
        """End it: cancel what works for it, and make the next call of a rollout in a thread raise."""
        self._is_closed.set()
        self._finish()
        for task in tuple(self._tasks):
            task.cancel()
