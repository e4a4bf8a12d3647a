"""Groups of a replay: recorded samples are written, and slots without one are passed on for generation."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from forebay.core.errors import InputRefused
from forebay.core.waiting import Signal
from forebay.generators.buffer_link.abc import Link, Plan, ReplayTask, RunWriter
from forebay.generators.job.reporter import Reporter
from forebay.generators.rollouts.open_group import GroupPlan, StepBarrier, rollout_numbers
from forebay.generators.rollouts.rejudging import Rejudge
from forebay.generators.rollouts.replayed_samples import ReplayedRollout, placed, recorded_rollouts
from forebay.replay.replayed_bodies import sampled_tokens

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Groups looked up and written concurrently, whose bodies are in memory."""
MAX_LEFT = 64
"""Maximum number of groups with missing rollouts waiting for the policy."""


@dataclass(frozen=True)
class ReplayParts:
    """Resources for writing recorded samples. ``rejudge`` gives them new rewards."""

    plan: Plan
    link: Link
    writer: RunWriter
    reporter: Reporter
    hold: StepBarrier
    rejudge: Rejudge | None


class ReplayedGroups:
    """A ``GroupSource`` of the scheduled groups that need rollouts, reduced to the slots that need them.

    ``run`` fills the other slots. A completely recorded group is not submitted to the policy and needs no engine.
    """

    def __init__(self, groups: Iterator[GroupPlan], replay: ReplayTask, parts: ReplayParts) -> None:
        self._groups, self._replay, self._parts = groups, replay, parts
        self.writer = parts.writer
        """Writer of recorded samples, watched and closed by the job."""
        self._left: deque[GroupPlan] = deque()
        self._under_way: set[str] = set()
        self._closed: set[str] = set()
        """Groups in ``_under_way`` that the buffer has closed."""
        self.error: InputRefused | None = None
        """The input error that ended the groups early, if any."""
        self._has_ended = False
        self._has_warned_of_rows = False
        self._room = Signal()
        self.has_left = asyncio.Event()
        """Set once any rollout has to be generated."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when ``take`` may return a group, or when no more follow."""

    # --- for the job

    @property
    def is_over(self) -> bool:
        """Whether no groups are left and no more follow."""
        return self._has_ended and not self._left

    @property
    def is_pending(self) -> bool:
        """Whether no group is available now but more may follow."""
        return not self._has_ended and not self._left

    def take(self) -> GroupPlan | None:
        """Remove and return the next group that needs rollouts; None if there is none."""
        self._room.notify()
        return self._left.popleft() if self._left else None

    def drop(self, group_id: str) -> None:
        """Drop a group that the buffer has closed."""
        if group_id in self._under_way:
            self._closed.add(group_id)
        self._left = deque(planned for planned in self._left if planned.group_id != group_id)
        self._room.notify()

    # --- recorded samples

    async def run(self) -> None:
        """Pass over the schedule and write the recorded samples in its order. Raises ``RunGone``."""
        places, before = asyncio.Semaphore(self._num_at_once), asyncio.Event()
        before.set()
        async with asyncio.TaskGroup() as tasks:
            while (planned := self._next()) is not None:
                await places.acquire()
                self._under_way.add(planned.group_id)
                done = asyncio.Event()
                tasks.create_task(self._use(planned, before, done)).add_done_callback(lambda _: places.release())
                before = done
                await self._wait_room()
        self._has_ended = True
        self.on_change()

    @property
    def _num_at_once(self) -> int:
        """Number of concurrent groups: more when scoring again, so that all reward slots are used."""
        rejudge = self._parts.rejudge
        return AT_ONCE + (0 if rejudge is None else rejudge.at_once // self._parts.plan.group_size)

    def _next(self) -> GroupPlan | None:
        try:
            return next(self._groups, None)
        except InputRefused as error:
            self.error = error  # groups read before it are still filled
            return None

    async def _wait_room(self) -> None:
        while len(self._left) >= MAX_LEFT:
            await self._room.wait()

    async def _use(self, planned: GroupPlan, before: asyncio.Event, done: asyncio.Event) -> None:
        """Write a group's recorded samples once ``before`` is set, and pass on its other slots."""
        recorded = await self._recorded(planned)
        left = tuple(slot for slot in planned.slots if slot not in recorded)
        await before.wait()
        if recorded:
            await self._write(planned, recorded, is_whole=not left)
        if left and self._replay.generates and planned.group_id not in self._closed:
            self._left.append(self._rest(planned, left))
            self.has_left.set()
        elif left and recorded and not self._replay.generates:
            await self.writer.flush()
            await self._parts.reporter.announce_incomplete(planned.key)
        self._parts.reporter.count(_counts(planned, recorded, len(left)))
        self._under_way.discard(planned.group_id)
        self._closed.discard(planned.group_id)
        done.set()
        self.on_change()

    def _rest(self, planned: GroupPlan, left: tuple[int, ...]) -> GroupPlan:
        return replace(planned, slots=left, numbers=rollout_numbers(self._parts.plan, planned.group_id, left))

    async def _recorded(self, planned: GroupPlan) -> Mapping[int, ReplayedRollout]:
        found = await self._parts.link.recorded(planned.key)
        if found is None:
            return {}
        rollouts = recorded_rollouts(found, planned.slots)
        rollouts = {slot: rollout for slot, rollout in rollouts.items() if self._is_of_row(rollout, planned)}
        rejudge = self._parts.rejudge
        if rejudge is None:
            return rollouts
        judged = await asyncio.gather(*(rejudge.judged(each, planned.row) for each in rollouts.values()))
        return dict(zip(rollouts, judged, strict=True))

    def _is_of_row(self, rollout: ReplayedRollout, planned: GroupPlan) -> bool:
        """Whether a rollout was made from the current row, or from a row that was not recorded."""
        if rollout.row_digest(planned.row) in (None, planned.row.digest):
            return True
        if not self._has_warned_of_rows:
            self._has_warned_of_rows = True
            what = "has changed since it was recorded: this and all other changed rows are generated again"
            logger.warning("row %r %s", planned.key[0], what)
        return False

    async def _write(self, planned: GroupPlan, recorded: Mapping[int, ReplayedRollout], *, is_whole: bool) -> None:
        parts = self._parts
        await parts.hold.wait()  # the step may have enough groups
        if is_whole:  # writing its samples opens the group, and waits for room
            parts.hold.note_complete(planned.group_id)
            parts.reporter.totals.num_groups_opened += 1
        else:
            await parts.reporter.announce_idle(planned.key)
        for rollout in recorded.values():
            for sample, body in placed(rollout, planned, parts.plan.run_id):
                await self.writer.write_encoded(sample, body)
            parts.reporter.note_sample(is_failed=rollout.main.record.reward is None)


def _counts(planned: GroupPlan, recorded: Mapping[int, ReplayedRollout], num_left: int) -> Counter[str]:
    rollouts = recorded.values()
    return Counter(
        replay_hits=len(recorded),
        replay_misses=num_left,
        replay_substitutes=sum(each.head.epoch != planned.epoch for each in rollouts),
        replay_tokens=sum(sampled_tokens(sample.body) for each in rollouts for sample in each.samples),
    )
