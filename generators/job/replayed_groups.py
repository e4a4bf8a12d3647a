"""Groups of which another run has recorded something: what is there goes out, what is left is handed on."""

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
"""Groups that are looked up, and written, side by side: their bodies are in memory."""
MAX_LEFT = 64
"""Groups with rollouts to be run that may wait for the policy to look at them."""


@dataclass(frozen=True)
class ReplayParts:
    """What recorded samples take to their groups. ``rejudge``: what gives them other rewards."""

    plan: Plan
    link: Link
    writer: RunWriter
    reporter: Reporter
    hold: StepBarrier
    rejudge: Rejudge | None


class ReplayedGroups:
    """A ``GroupSource`` with the groups of a schedule that need rollouts, and only the slots that do.

    ``run`` fills the others. A group whose every slot was recorded is seen by no policy, and needs no engine.
    """

    def __init__(self, groups: Iterator[GroupPlan], replay: ReplayTask, parts: ReplayParts) -> None:
        self._groups, self._replay, self._parts = groups, replay, parts
        self.writer = parts.writer
        """Takes what was recorded; whoever runs the rest watches and closes it."""
        self._left: deque[GroupPlan] = deque()
        self._under_way: set[str] = set()
        self._closed: set[str] = set()
        """Of those, what the buffer has closed."""
        self.error: InputRefused | None = None
        """Why no group comes any more, if that is not the end of the file."""
        self._has_ended = False
        self._has_warned_of_rows = False
        self._room = Signal()
        self.has_left = asyncio.Event()
        """Whether anything has to be generated, as far as that is known."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when ``take`` may have something, or nothing more comes."""

    # --- for whoever runs the rest

    @property
    def is_over(self) -> bool:
        """Nothing is left to be taken, and nothing comes."""
        return self._has_ended and not self._left

    @property
    def is_pending(self) -> bool:
        """Nothing is there at present, but something may come."""
        return not self._has_ended and not self._left

    def take(self) -> GroupPlan | None:
        """The next group that needs rollouts; None if none is there."""
        self._room.notify()
        return self._left.popleft() if self._left else None

    def drop(self, group_id: str) -> None:
        """The buffer has closed a group."""
        if group_id in self._under_way:
            self._closed.add(group_id)
        self._left = deque(planned for planned in self._left if planned.group_id != group_id)
        self._room.notify()

    # --- what was recorded

    async def run(self) -> None:
        """Pass over the schedule, and write what was recorded, in its order. Raises ``RunGone``."""
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
        """Groups side by side: more where judges are asked, so that as many are as may be."""
        rejudge = self._parts.rejudge
        return AT_ONCE + (0 if rejudge is None else rejudge.at_once // self._parts.plan.group_size)

    def _next(self) -> GroupPlan | None:
        try:
            return next(self._groups, None)
        except InputRefused as error:
            self.error = error  # what was read before it is filled
            return None

    async def _wait_room(self) -> None:
        while len(self._left) >= MAX_LEFT:
            await self._room.wait()

    async def _use(self, planned: GroupPlan, before: asyncio.Event, done: asyncio.Event) -> None:
        """Write what was recorded of a group, after what is ``before`` it, and hand on what is left of it."""
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
        """Whether it was made of the row as it is now, as far as that is known."""
        if rollout.row_digest(planned.row) in (None, planned.row.digest):
            return True
        if not self._has_warned_of_rows:
            self._has_warned_of_rows = True
            what = "has changed since it was recorded: it is generated anew, and so are others of which that is true"
            logger.warning("row %r %s", planned.key[0], what)
        return False

    async def _write(self, planned: GroupPlan, recorded: Mapping[int, ReplayedRollout], *, is_whole: bool) -> None:
        parts = self._parts
        await parts.hold.wait()  # it could be another group than the step needs
        if is_whole:  # its samples open it, and wait for room themselves
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
