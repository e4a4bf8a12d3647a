"""The groups that a run process is filling: how long each may still take, and what happens when one closes."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
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
from forebay.generators.buffer_link.abc import GroupKey, Plan
from forebay.generators.rollouts.step_gate import Hold


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
        self._tasks: dict[asyncio.Task[object], int] = {}
        self._calls: set[Call] = set()
        self._streams: set[Call] = set()
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
