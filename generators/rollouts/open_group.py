"""Groups that a run process is filling: their deadlines, what ends when one closes, and the barrier between steps."""

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
    """One group to open, its missing slots, and the numbers of the rollouts that will fill them."""

    row: TaskRow
    epoch: int
    slots: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def key(self) -> GroupKey:
        """The group's instance and epoch."""
        return self.row.instance_id, self.epoch

    @property
    def group_id(self) -> str:
        """The group's id."""
        return group_id(*self.key)

    @property
    def num_chars(self) -> int:
        """Length of the prompt in characters."""
        return sum(len(content) for message in self.row.prompt if isinstance(content := message.get("content"), str))


def rollout_numbers(
    plan: Plan, group: str, slots: Sequence[int], first: int = 0, num_spares: int | None = None
) -> tuple[int, ...]:
    """Return numbers, starting at ``first``, for the rollouts that will fill ``slots``, including spares.

    The slots' own numbers come first. Each number determines a uid, and no uid is used twice.
    """
    beyond = count(max(first, plan.group_size))
    candidates = chain((slot for slot in slots if slot >= first), beyond)
    free = (number for number in candidates if rollout_uid(plan.run_id, group, number) not in plan.uids)
    return tuple(islice(free, len(slots) + (plan.num_spares if num_spares is None else num_spares)))


class GroupClosed(BaseException):
    """Raised by a rollout's client when its group is closed and the rollout is no longer needed.

    Like ``asyncio.CancelledError``, not an ``Exception``, so that rollout functions that retry on errors end too.
    """


class RolloutBroken(BaseException):
    """Raised by a rollout's client when the rollout has reached its token cap and must be run again elsewhere."""


class RolloutLost(Exception):
    """Raised in place of a rollout's samples when its worker is gone. The rollout must be run again."""


class StepBarrier:
    """Counts the complete groups of a step and pauses the run at ``groups_per_step``; with None, it never pauses.

    ``clock`` is the clock of the run's deadlines. While no engine answers, a rollout waits up to ``engine_wait_s``.
    ``on_change`` is called in the event loop, with True when the run is paused and with False when it resumes.
    """

    def __init__(
        self,
        groups_per_step: int | None = None,
        clock: ActiveClock | None = None,
        engine_wait_s: float = ENGINE_WAIT_S,
    ) -> None:
        self.on_change: Callable[[bool], None] = lambda _: None
        self.on_news: Callable[[], None] = lambda: None
        """Called in the event loop after each ``note_step``, and after each change of ``is_held`` or ``is_paused``."""
        self.is_held = False
        self._is_paused = False
        self._groups_per_step = groups_per_step
        self._clock, self.engine_wait_s = clock, engine_wait_s
        self._number = 0
        self._counted: set[str] = set()
        self._calls: WeakSet[CallSpan] = WeakSet()
        self._lock = threading.Lock()
        self._changed = Signal()

    def note_complete(self, group_id: str) -> None:
        """Note that the last slot of a group is filled, possibly before the server knows."""
        if self._groups_per_step is not None:  # without steps, the set would only grow
            self._counted.add(group_id)
            self._update()

    def note_step(self, step: Step) -> None:
        """Apply the server's step: a new step starts with its own groups only, and a discarded group is uncounted."""
        if step.number != self._number:
            self._number = step.number
            self._counted.clear()
        self._counted |= set(step.counted)
        self._counted -= set(step.discarded)
        self._update()
        self.on_news()

    async def wait(self) -> None:
        """Wait until the run is not paused."""
        while self.is_held:
            await self._changed.wait()

    @property
    def num_counted(self) -> int:
        """Number of complete groups in the step."""
        return len(self._counted)

    @property
    def step(self) -> int:
        """Number of weight versions announced so far, as reported by the server."""
        return self._number

    @property
    def may_call(self) -> bool:
        """Whether engine calls may be sent: neither the run nor its engines are paused."""
        return not (self.is_held or self._is_paused)

    @property
    def is_waiting(self) -> bool:
        """Whether deadlines are paused although calls may be sent, because no engine answers."""
        return self.may_call and self._clock is not None and not self._clock.is_running

    def note_paused(self, is_paused: bool) -> None:
        """Note that the engines were paused or resumed. Samples that finish meanwhile are still sent."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                call.note_paused(is_paused)
            self._changed.notify()
            self.on_news()

    @property
    def is_paused(self) -> bool:
        """Whether the engines are paused."""
        return self._is_paused

    def follow(self, *, is_held: bool, is_paused: bool, number: int) -> None:
        """Copy the state of another barrier, which does the counting."""
        self._number, self.is_held = number, is_held
        self.note_paused(is_paused)
        self._changed.notify()

    def note_call(self, call: CallSpan) -> None:
        """Register an outgoing call, so that engine pauses are recorded in its span. Thread-safe."""
        with self._lock:
            self._calls.add(call)

    async def wait_call(self) -> None:
        """Wait until engine calls may be sent."""
        while not self.may_call:
            await self._changed.wait()

    def _update(self) -> None:
        is_held = self._groups_per_step is not None and len(self._counted) >= self._groups_per_step
        if is_held == self.is_held:
            return
        self.is_held = is_held
        if is_held:
            logger.info("paused: the step has its %d groups; resumes at the next weight version", len(self._counted))
        else:
            logger.info("resumed")
            # Groups are updated before waiters wake up, so that these see the new state.
        self.on_change(is_held)
        self._changed.notify()
        self.on_news()


class Execution(Protocol):
    """One attempt of a rollout, reduced to its token count and its trajectory."""

    num_sampled_tokens: int
    trajectory: Recorded


class OpenGroup:
    """One group, from the announcement of its first rollout to the end of its last.

    Rollouts are numbered; a sample gets its slot when it is admitted. The group ages by ``clock`` while one of its
    rollouts is in flight. ``age_s`` is the age to start with, if this group continues another.
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
        """Whether engine calls request token ids and logprobs."""
        self.hold = hold or StepBarrier()
        """Barrier that engine calls must pass."""
        self.is_finished = False
        """Whether the last rollout has ended or the group is closed."""
        self.num_left = len(group.numbers)
        """Number of rollouts that have not ended, including those not yet started."""
        self.rollouts: dict[int, list[Execution]] = {}
        """Executions by rollout number, one per attempt."""
        self._run_plan = plan
        self._free_slots = list(group.slots)
        self._changed = Signal()
        self._is_closed = threading.Event()
        self.on_change: Callable[[OpenGroup], object] = lambda _: None
        """Called when the group becomes idle, and when it stops being idle."""
        self._clock = clock
        self._age = GroupAge(clock, plan.group_timeout_s, plan.group_deadline_s, age_s)
        # How deeply each task is nested in `working`.
        self._tasks: dict[asyncio.Task[object], int] = {}
        self._calls: set[Call] = set()
        self._streams: set[Call] = set()
        # Rollout functions that are not async register their calls from threads.
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether the group is closed, so that new samples would not be used."""
        return self._is_closed.is_set()

    @property
    def is_complete(self) -> bool:
        """Whether every slot has its sample."""
        return not self._free_slots

    def left_s(self) -> float:
        """Seconds until the group closes unless another sample arrives; 0 once it is closed."""
        return 0.0 if self.is_closed else self._age.left_s()

    def deadline_left_s(self) -> float:
        """Seconds until the group's deadline, which no sample extends."""
        return self._age.deadline_left_s()

    @property
    def is_idle(self) -> bool:
        """Whether the group still needs rollouts and none is in flight. An idle group does not age."""
        return self._age.is_stopped and not self.is_finished

    def enter(self) -> None:
        """Note that one more rollout is in flight."""
        was_idle = self.is_idle
        self._age.enter()
        if was_idle:
            self._changed.notify()
            self.on_change(self)

    def leave(self) -> None:
        """Note that a rollout is no longer in flight."""
        self._age.leave()
        if self.is_idle:
            self.on_change(self)

    def note_rollout(self, number: int, rollout: Execution) -> None:
        """Register a new attempt of a rollout."""
        self.rollouts.setdefault(number, []).append(rollout)

    def admit(self, number: int, *, is_failed: bool) -> int | None:
        """Return the slot for a rollout's sample, its own if that is free; None if the sample is not needed.

        A failed sample is not needed while enough other rollouts remain to fill the slots.
        """
        if self.is_complete or (is_failed and self.num_left > len(self._free_slots)):
            return None
        # Its own slot if possible: without oversampling, numbers and slots are then equal everywhere.
        slot = number if number in self._free_slots else self._free_slots[0]
        self._free_slots.remove(slot)
        return slot

    def afresh(self, *, is_whole: bool = False) -> "OpenGroup":
        """Return this group with new rollouts for its free slots. The old object admits no more samples.

        With ``is_whole``, all slots are filled again, without spares: use it when none of the samples was stored.
        """
        slots = self.plan.slots if is_whole else tuple(self._free_slots)
        self._free_slots.clear()  # a rollout that ends only now gets no slot
        first, num_spares = max(self.numbers) + 1, 0 if is_whole else None
        numbers = rollout_numbers(self._run_plan, self.group_id, slots, first, num_spares)
        group = GroupPlan(self.row, self.epoch, slots, numbers)
        return OpenGroup(self._run_plan, group, self._clock, self.hold, age_s=self._age.now_s())

    def note_sample(self) -> None:
        """Note a finished sample: the group's timeout restarts, within its deadline."""
        self._age.note_sample()
        self._changed.notify()

    async def wait_expired(self) -> bool:
        """Wait until the group expires (returns True) or is finished (returns False)."""
        while not self.is_finished and (left_s := self.left_s()):
            # Asked again after each wait: the clock may have been paused, and a sample may move the end either way.
            await self._changed.wait(None if self.is_idle else max(left_s, 0.05))
        return not self.is_finished

    def note_rollout_ended(self) -> None:
        """Note that a rollout has ended, with any outcome."""
        self.num_left -= 1
        if not self.num_left:
            self._finish()

    def _finish(self) -> None:
        was_idle = self.is_idle
        self.is_finished = True
        self._changed.notify()
        if was_idle:
            self.on_change(self)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Cancel the current task if the group closes inside this context. May be nested."""
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
        """Register a call as in flight inside this context. Thread-safe."""
        with self._lock:
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def begin_stream(self, call: Call) -> None:
        """Register a call whose answer is a stream being read."""
        with self._lock:
            self._streams.add(call)

    def end_stream(self, call: Call) -> None:
        """Unregister a stream that has ended or is no longer read. May be called twice."""
        with self._lock:
            self._streams.discard(call)

    def calls(self) -> list[Call]:
        """Return the calls that were sent and not answered, including streams being read."""
        with self._lock:
            return list(self._calls | self._streams)

    def whole_calls(self) -> list[Call]:
        """Return the unanswered calls, without streams being read."""
        with self._lock:
            return list(self._calls)

    def shut(self) -> None:
        """Close the group but let calls in flight end. The next call of each rollout raises ``GroupClosed``."""
        self._is_closed.set()
        self._finish()

    def close(self) -> None:
        """Close the group and cancel its tasks. In a thread, the next call of a rollout raises ``GroupClosed``."""
        self.shut()
        for task in tuple(self._tasks):
            task.cancel()
