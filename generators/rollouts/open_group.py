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
from weakref import WeakSet

from forebay.core.clock import ActiveClock
from forebay.core.ids import group_id, group_rid_prefix, rollout_uid
from forebay.core.task_row import TaskRow
from forebay.core.waiting import Signal
from forebay.engines.capture.call_spans import CallSpan
from forebay.engines.capture.sample_fields import Recorded
from forebay.engines.pool import Call
from forebay.generators.buffer_link.abc import GroupKey, Plan, Step
from forebay.generators.failures import ENGINE_WAIT_S
from forebay.generators.rollouts.group_age import GroupAge

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupPlan:
    """One group to open, the slots of it that are missing, and the numbers of the rollouts that are to fill them."""

    row: TaskRow
    epoch: int
    slots: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def key(self) -> GroupKey:
        """Its instance and epoch."""
        return self.row.instance_id, self.epoch

    @property
    def group_id(self) -> str:
        """Of the group."""
        return group_id(*self.key)

    @property
    def num_chars(self) -> int:
        """Length of its prompt."""
        return sum(len(content) for message in self.row.prompt if isinstance(content := message.get("content"), str))


def rollout_numbers(
    plan: Plan, group: str, slots: Sequence[int], first: int = 0, num_spares: int | None = None
) -> tuple[int, ...]:
    """Numbers, from ``first`` on, for the rollouts that are to fill ``slots``, spares included.

    A slot's own number comes first. Each stands for a uid, and none is used twice.
    """
    beyond = count(max(first, plan.group_size))
    candidates = chain((slot for slot in slots if slot >= first), beyond)
    free = (number for number in candidates if rollout_uid(plan.run_id, group, number) not in plan.uids)
    return tuple(islice(free, len(slots) + (plan.num_spares if num_spares is None else num_spares)))


class GroupClosed(BaseException):
    """Raised by a rollout's client: the group is closed, the rollout is of no use any more.

    Like ``asyncio.CancelledError`` no ``Exception``, so that a rollout function that retries on errors ends too.
    """


class RolloutBroken(BaseException):
    """Raised by a rollout's client: it has sampled as much as its cap allows, and is to be run again elsewhere."""


class RolloutLost(Exception):
    """Raised in place of a rollout's samples: the worker in which it ran is gone. It is to be run again."""


class StepBarrier:
    """Counts the complete groups of a step. With ``groups_per_step`` None the run is never held.

    ``clock`` is that of the run's deadlines. While no engine answers, a rollout waits up to ``engine_wait_s``.
    ``on_change`` is called, in the event loop, with True when the run begins to be held and with False when it goes on.
    """

    def __init__(
        self,
        groups_per_step: int | None = None,
        clock: ActiveClock | None = None,
        engine_wait_s: float = ENGINE_WAIT_S,
    ) -> None:
        self.on_change: Callable[[bool], None] = lambda _: None
        self.on_news: Callable[[], None] = lambda: None
        """Called after whatever it was told, in the event loop."""
        self.is_held = False
        self._is_paused = False
        self._groups_per_step = groups_per_step
        self._clock, self.engine_wait_s = clock, engine_wait_s
        self._number = 0
        self._counted: set[str] = set()
        self._calls: WeakSet[CallSpan] = WeakSet()
        self._lock = threading.Lock()
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
        self.on_news()

    async def wait(self) -> None:
        """Return when the run is not held; at once if it is not."""
        while self.is_held:
            await self._news.wait()

    @property
    def num_counted(self) -> int:
        """Complete groups that the step has."""
        return len(self._counted)

    @property
    def step(self) -> int:
        """How often a weight version was announced, as far as the server has said."""
        return self._number

    @property
    def may_call(self) -> bool:
        """Whether engine calls may go out: the run is not held, and its engines do not stand still."""
        return not (self.is_held or self._is_paused)

    @property
    def is_waiting(self) -> bool:
        """Whether deadlines are paused although calls may go out: no engine answers."""
        return self.may_call and self._clock is not None and not self._clock.is_running

    def note_paused(self, is_paused: bool) -> None:
        """The engines stand still, or go on. What has ended meanwhile is sent all the same."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                call.note_paused(is_paused)
            self._news.notify()
            self.on_news()

    @property
    def is_paused(self) -> bool:
        """Whether the engines stand still."""
        return self._is_paused

    def follow(self, *, is_held: bool, is_paused: bool, number: int) -> None:
        """Be as another one is, which counts."""
        self._number, self.is_held = number, is_held
        self.note_paused(is_paused)
        self._news.notify()

    def note_call(self, call: CallSpan) -> None:
        """A call goes out: where its engine stands still meanwhile, that is recorded. Also used from threads."""
        with self._lock:
            self._calls.add(call)

    async def wait_call(self) -> None:
        """Return when engine calls may go out."""
        while not self.may_call:
            await self._news.wait()

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
        self.on_news()


class Execution(Protocol):
    """One attempt of a rollout, as far as it is counted."""

    num_sampled_tokens: int
    trajectory: Recorded


class OpenGroup:
    """One group between the announcement of its first rollout and the end of its last.

    ``rollouts`` are numbered; a sample gets its slot when it is admitted. ``age_s`` is that of a group which this one
    goes on with. It ages by ``clock`` while one of its rollouts is in flight.
    """

    def __init__(
        self,
        plan: Plan,
        group: GroupPlan,
        clock: ActiveClock,
        hold: StepBarrier | None = None,
        *,
        age_s: float = 0.0,
    ) -> None:
        self.plan = group
        self.key: GroupKey = group.key
        self.row = group.row
        self.epoch = group.epoch
        self.numbers = group.numbers
        self.group_id = group.group_id
        self.rid_prefix = group_rid_prefix(plan.run_id, self.group_id)
        self.captures = plan.captures
        """Whether its engine calls ask for tokens."""
        self.hold = hold or StepBarrier()
        """What its engine calls pass first."""
        self.is_finished = False
        """Its last rollout has ended, or it is closed."""
        self.num_left = len(group.numbers)
        """Rollouts that have not ended, those that did not begin included."""
        self.rollouts: dict[int, list[Execution]] = {}
        """The executions of its rollouts by number, one for each attempt."""
        self._run_plan = plan
        self._free_slots = list(group.slots)
        self._news = Signal()
        self._is_closed = threading.Event()
        self.on_change: Callable[[OpenGroup], object] = lambda _: None
        """Told when it is idle, and when it is not any more."""
        self._clock = clock
        self._age = GroupAge(clock, plan.group_timeout_s, plan.group_deadline_s, age_s)
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
        return 0.0 if self.is_closed else self._age.left_s()

    def deadline_left_s(self) -> float:
        """Seconds until it is closed at the latest."""
        return self._age.deadline_left_s()

    @property
    def is_idle(self) -> bool:
        """It still needs rollouts, and none is in flight: it does not age."""
        return self._age.stands_still and not self.is_finished

    def enter(self) -> None:
        """One of its rollouts is in flight from now on."""
        was_idle = self.is_idle
        self._age.enter()
        if was_idle:
            self._news.notify()
            self.on_change(self)

    def leave(self) -> None:
        """It is not any more."""
        self._age.leave()
        if self.is_idle:
            self.on_change(self)

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

    def afresh(self, *, is_whole: bool = False) -> "OpenGroup":
        """The same group with other rollouts for the slots that are free; this one takes no more samples.

        ``is_whole``: for all of its slots, as nothing of it was stored, and without spares.
        """
        slots = self.plan.slots if is_whole else tuple(self._free_slots)
        self._free_slots.clear()  # one that ends only now has no slot any more
        first, num_spares = max(self.numbers) + 1, 0 if is_whole else None
        numbers = rollout_numbers(self._run_plan, self.group_id, slots, first, num_spares)
        group = GroupPlan(self.row, self.epoch, slots, numbers)
        return OpenGroup(self._run_plan, group, self._clock, self.hold, age_s=self._age.now_s())

    def note_sample(self) -> None:
        """A sample was finished: the group's time-out begins again, within its deadline."""
        self._age.note_sample()
        self._news.notify()

    async def wait_expired(self) -> bool:
        """Wait until its time is up (true), or it is finished before."""
        while not self.is_finished and (left_s := self.left_s()):
            # The clock may stand still meanwhile, and a sample may move the end either way: it is asked again.
            await self._news.wait(None if self.is_idle else max(left_s, 0.05))
        return not self.is_finished

    def note_rollout_ended(self) -> None:
        """One of its rollouts has ended, in whatever way."""
        self.num_left -= 1
        if not self.num_left:
            self._finish()

    def _finish(self) -> None:
        was_idle = self.is_idle
        self.is_finished = True
        self._news.notify()
        if was_idle:
            self.on_change(self)

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
