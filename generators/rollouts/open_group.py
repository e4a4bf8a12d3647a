"""The groups that a run process is filling: how long each may take, what happens when one closes, and the hold between
steps, for which all of them wait."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Protocol

from forebay.core.clock import ActiveClock
from forebay.core.ids import group_id, group_rid_prefix, rollout_uid
from forebay.core.task_row import TaskRow
from forebay.core.waiting import Signal
from forebay.engines.capture.sample_fields import Recorded
from forebay.engines.ring import Call
from forebay.generators.buffer_link.abc import GroupKey, Plan, Step

logger = logging.getLogger(__name__)
# A signal is waited for with a limit; who waits looks again then, and nothing else depends on it.
WAIT_S = 3_600.0


@dataclass(frozen=True)
class GroupPlan:
    """One group to open, the slots of it that are missing, and the numbers of the rollouts that are to fill them."""

    row: TaskRow
    epoch: int
    slots: tuple[int, ...]
    numbers: tuple[int, ...]


def rollout_numbers(plan: Plan, group: str, slots: Sequence[int], first: int = 0) -> tuple[int, ...]:
    """Numbers, from ``first`` on, for the rollouts that are to fill ``slots``, spares included.

    A slot's own number comes first. Each stands for a uid, and none is used twice.
    """
    beyond = count(max(first, plan.group_size))
    candidates = chain((slot for slot in slots if slot >= first), beyond)
    free = (number for number in candidates if rollout_uid(plan.run_id, group, number) not in plan.uids)
    return tuple(islice(free, len(slots) + plan.num_spares))


class GroupClosed(BaseException):
    """Raised by a rollout's client: the group is closed, the rollout is of no use any more.

    Like ``asyncio.CancelledError`` no ``Exception``, so that a rollout function that retries on errors ends too.
    """


class Hold:
    """Counts the complete groups of a step. With ``groups_per_step`` None the run is never held.

    ``on_change`` is called, in the event loop, with True when the run begins to be held and with False when it goes on.
    """

    def __init__(self, groups_per_step: int | None = None) -> None:
        self.on_change: Callable[[bool], None] = lambda _: None
        self.is_held = False
        self._is_paused = False
        self._groups_per_step = groups_per_step
        self._number = 0
        self._counted: set[str] = set()
        self._news = Signal()

    def note_complete(self, group_id: str) -> None:
        """The last slot of a group is filled. It may be told before the server knows."""
        if self._groups_per_step is not None:  # else nothing ever forgets them
            self._counted.add(group_id)
            self._update()

    def note_step(self, step: Step) -> None:
        """Take what the server says: another step begins with its groups only, and a discarded one makes room."""
        if step.number != self._number:
            self._number = step.number
            self._counted.clear()
        self._counted |= set(step.counted)
        self._counted -= set(step.discarded)
        self._update()

    async def wait(self) -> None:
        """Return when the run is not held; at once if it is not."""
        while self.is_held:
            await self._news.wait(WAIT_S)

    @property
    def may_call(self) -> bool:
        """Whether engine calls may go out: the run is not held, and its engines do not stand still."""
        return not (self.is_held or self._is_paused)

    def note_paused(self, is_paused: bool) -> None:
        """The engines stand still, or go on. What has ended meanwhile is sent all the same."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            self._news.notify()

    async def wait_call(self) -> None:
        """Return when engine calls may go out."""
        while not self.may_call:
            await self._news.wait(WAIT_S)

    def _update(self) -> None:
        is_held = self._groups_per_step is not None and len(self._counted) >= self._groups_per_step
        if is_held == self.is_held:
            return
        self.is_held = is_held
        if is_held:
            logger.info("held: the step has its %d groups; the next weight version lets it go on", len(self._counted))
        else:
            logger.info("no longer held")
        # First what becomes of the groups, then those who wait: they find them as they are to be.
        self.on_change(is_held)
        self._news.notify()


class Execution(Protocol):
    """One attempt of a rollout, as far as it is counted."""

    num_sampled_tokens: int
    trajectory: Recorded


class OpenGroup:
    """One group between the announcement of its first rollout and the end of its last.

    ``rollouts`` are numbered; a sample gets its slot when it is admitted. ``deadline_s`` is that of a group which this
    one goes on with, by ``clock``.
    """

    def __init__(
        self,
        plan: Plan,
        group: GroupPlan,
        clock: ActiveClock,
        hold: Hold | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        self.key: GroupKey = (group.row.instance_id, group.epoch)
        self.row = group.row
        self.epoch = group.epoch
        self.numbers = group.numbers
        self.group_id = group_id(*self.key)
        self.rid_prefix = group_rid_prefix(plan.run_id, self.group_id)
        self.captures = plan.captures
        """Whether its engine calls ask for tokens."""
        self.hold = hold or Hold()
        """What its engine calls pass first."""
        self.is_finished = False
        """Its last rollout has ended, or it is closed."""
        self.num_left = len(group.numbers)
        """Rollouts that have not ended, those that did not begin included."""
        self.rollouts: dict[int, list[Execution]] = {}
        """The executions of its rollouts by number, one for each attempt."""
        self._plan = plan
        self._free_slots = list(group.slots)
        self._news = Signal()
        self._is_closed = threading.Event()
        self._clock = clock
        self._timeout_s = plan.group_timeout_s
        self._deadline_s = clock.now_s() + plan.group_deadline_s if deadline_s is None else deadline_s
        self._ends_s = self._deadline_s
        # How many times each task has entered `working`.
        self._tasks: dict[asyncio.Task[object], int] = {}
        self._calls: set[Call] = set()
        self._streams: set[Call] = set()
        # Rollout functions that are not async note their calls from threads.
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Nothing that is generated for it now would be used."""
        return self._is_closed.is_set()

    @property
    def is_complete(self) -> bool:
        """Every slot has its sample."""
        return not self._free_slots

    def left_s(self) -> float:
        """Seconds until it is closed unless another sample comes; 0 once it is."""
        return 0.0 if self.is_closed else max(0.0, self._ends_s - self._clock.now_s())

    def note_rollout(self, number: int, rollout: Execution) -> None:
        """An attempt of a rollout begins."""
        self.rollouts.setdefault(number, []).append(rollout)

    def admit(self, number: int, *, is_failed: bool) -> int | None:
        """The slot for the sample of a rollout: its own one if that is free. None if the sample is not needed.

        A failed one is not, as long as other rollouts can fill the slots.
        """
        if self.is_complete or (is_failed and self.num_left > len(self._free_slots)):
            return None
        # Its own slot if it can be had: without oversampling, numbers and slots are then the same everywhere.
        slot = number if number in self._free_slots else self._free_slots[0]
        self._free_slots.remove(slot)
        return slot

    def afresh(self) -> "OpenGroup":
        """The same group with other rollouts for the slots that are free; this one takes no more samples."""
        slots = tuple(self._free_slots)
        self._free_slots.clear()  # one that ends only now has no slot any more
        numbers = rollout_numbers(self._plan, self.group_id, slots, first=max(self.numbers) + 1)
        group = GroupPlan(self.row, self.epoch, slots, numbers)
        return OpenGroup(self._plan, group, self._clock, self.hold, deadline_s=self._deadline_s)

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
        self.num_left -= 1
        if not self.num_left:
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

    def begin_stream(self, call: Call) -> None:
        """The answer of a call is a stream, which is being read from now on."""
        with self._lock:
            self._streams.add(call)

    def end_stream(self, call: Call) -> None:
        """It was read to its end, or is not read any further. May be told twice."""
        with self._lock:
            self._streams.discard(call)

    def calls(self) -> list[Call]:
        """The calls that were sent and not answered, streams that are being read among them."""
        with self._lock:
            return list(self._calls | self._streams)

    def whole_calls(self) -> list[Call]:
        """Those of them whose answer will come in one piece."""
        with self._lock:
            return list(self._calls)

    def shut(self) -> None:
        """Its calls in flight may end, and the next call of each rollout raises ``GroupClosed``."""
        self._is_closed.set()
        self._finish()

    def close(self) -> None:
        """End it: cancel what works for it, and make the next call of a rollout in a thread raise."""
        self.shut()
        for task in tuple(self._tasks):
            task.cancel()
