"""Starting what the policy chooses: groups are announced before their first rollout, and each rollout has its place."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from forebay.core.scheduling.policy import RolloutKey
from forebay.core.waiting import Signal
from forebay.generators.job.deferral import Deferral
from forebay.generators.job.group_feed import GroupFeed
from forebay.generators.job.open_groups import OpenGroups
from forebay.generators.job.ports import JobParts
from forebay.generators.rollouts.open_group import GroupPlan, OpenGroup
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import QueueWait, RolloutTrace
from forebay.telemetry.tracing.tracer import SpanHandle

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""How long nothing may happen before the engines are looked at again: one may be back, or new behind its router."""

FULL_AFTER_S = 2.0
"""How long a group waits for room in the buffer until that counts as full; an announcement takes milliseconds."""

STUCK_S = 300.0
"""Groups in which nothing runs do not age, so nothing else would ever end such a run."""

RunRollout = Callable[[OpenGroup, RolloutTrace, RolloutSlot], Coroutine[Any, Any, None]]


class PolicyStuck(RuntimeError):
    """A policy keeps groups waiting although engines are free: that is a mistake of the policy."""


@dataclass
class PendingGroup:
    """A group on its way to the buffer, and what was chosen of it meanwhile."""

    planned: GroupPlan
    rollout_slots: list[RolloutSlot] = field(default_factory=list)
    is_closed: bool = False


class Dispatcher:
    """Asks the policy for every free place, and starts what it says."""

    def __init__(
        self, parts: JobParts, feed: GroupFeed, deferral: Deferral, open_groups: OpenGroups, run: RunRollout
    ) -> None:
        self._parts = parts
        self._policy, self._loads, self._hold, self._traces = parts.policy, parts.loads, parts.hold, parts.traces
        self._feed, self._deferral, self._open, self._run = feed, deferral, open_groups, run
        self._waits = QueueWait(parts.traces.tracer)
        self.changed = Signal()
        """That something may be started now."""
        self._pending: dict[str, PendingGroup] = {}
        """By id: one at a time, as long as the policy heeds ``may_begin``."""
        self._admitted: deque[RolloutSlot] = deque()
        """Chosen while their group was on its way to the buffer; they get the next places."""
        self._again: dict[RolloutKey, tuple[RolloutTrace, SpanHandle]] = {}
        """Broken rollouts, and lost ones, which wait to be chosen once more."""
        self._num_going = 0
        """Groups that were begun, and have not ended."""
        self._stuck_from_s = math.inf
        self._tasks: asyncio.TaskGroup

    async def start_all(self, tasks: asyncio.TaskGroup) -> None:
        """Start what there is to start, as ``tasks``; return when every group has ended."""
        self._tasks = tasks
        self._stuck_from_s = asyncio.get_running_loop().time() + STUCK_S
        while self._has_groups:
            if self._feed.is_expecting and not self._num_going:
                await self._wait_expected()
                continue
            await self._wait_startable()
            if self._hold.is_held:  # its last group has ended meanwhile: nobody may announce weights any more
                continue
            self._feed.refill()
            rollout_slot = self._chosen()
            if rollout_slot is None:
                await self._wait_changed()
            elif not self._start(rollout_slot):
                rollout_slot.leave()
                await asyncio.sleep(0)  # a policy that chooses nothing else would keep everybody else from their turn

    # --- what is started

    @property
    def _has_groups(self) -> bool:
        return bool(self._num_going) or not self._feed.is_empty

    async def _wait_startable(self) -> None:
        """Return when somebody can run a rollout, an engine answers, and the run is not held; or has no groups left."""
        begun_s = asyncio.get_running_loop().time()
        with self._waits.waiting("queue"):
            await self._parts.runner.when_ready()
        with self._waits.waiting("engine_wait"), suppress(TimeoutError):
            await self._wait_engine()
        with self._waits.waiting("hold"):
            while self._hold.is_held and self._has_groups:
                await self.changed.wait()
        self._stuck_from_s += asyncio.get_running_loop().time() - begun_s  # no policy can start anything meanwhile

    async def _wait_engine(self) -> None:
        """Raises ``TimeoutError`` if all groups have ended before an engine answers."""
        async with asyncio.timeout(None) as limit:
            self._closing = asyncio.get_running_loop().call_later(self._hold.engine_wait_s, self._close_stranded, limit)
            try:
                answering = await self._parts.pool.when_up()
            finally:
                self._closing.cancel()
        for url in self._loads.set_engines(answering):
            self._policy.engine_lost(url)

    def _close_stranded(self, limit: asyncio.Timeout) -> None:
        """No engine has answered for too long: close the groups that have nothing in flight, now and from now on."""
        loop = asyncio.get_running_loop()
        self._closing = loop.call_later(LOOK_AGAIN_S, self._close_stranded, limit)
        if not self._has_groups:
            limit.reschedule(loop.time())
        for group in self._open.unfinished():
            if group.is_idle:
                logger.warning("group %s of instance %r is closed: no engine answers", group.group_id, group.key[0])
                self._open.close_incomplete(group)

    async def _wait_expected(self) -> None:
        """Nothing is there to be run, and perhaps nothing will be: no engine is waited for."""
        begun_s = asyncio.get_running_loop().time()
        await self.changed.wait()
        self._stuck_from_s += asyncio.get_running_loop().time() - begun_s

    async def _wait_changed(self) -> None:
        self._check_policy()
        # A group that is being announced has its own word for it.
        with nullcontext() if self._pending else self._waits.waiting("queue"):
            await self.changed.wait(LOOK_AGAIN_S)

    def _check_policy(self) -> None:
        """Raise ``PolicyStuck`` if it has started nothing for long although nothing is in its way."""
        now_s = asyncio.get_running_loop().time()
        if self._loads.total or self._pending:
            self._stuck_from_s = now_s + STUCK_S
        elif now_s > self._stuck_from_s:
            raise PolicyStuck(
                f"{type(self._policy).__name__} has started nothing for {STUCK_S:g} s, though groups wait"
            )

    def _chosen(self) -> RolloutSlot | None:
        num_free = self._loads.num_places * self._policy.concurrency - self._loads.total
        if self._admitted and num_free > 0:
            return self._admitted.popleft()
        if num_free <= self._num_kept:
            return None
        chosen = self._policy.next(self._loads)
        return None if chosen is None else RolloutSlot(chosen, self._loads)

    @property
    def _num_kept(self) -> int:
        """Places kept for a group on its way to the buffer. If that is full, only others can make room there."""
        return 0 if self._loads.is_buffer_full else sum(len(each.rollout_slots) for each in self._pending.values())

    def _start(self, rollout_slot: RolloutSlot) -> bool:
        """Whether it could be: its group may have closed since."""
        key = rollout_slot.rollout
        planned = self._feed.begin(key.group)
        if planned is not None:
            pending = self._pending[key.group] = PendingGroup(planned, [rollout_slot])
            self._loads.may_begin = False
            self._num_going += 1
            self._tasks.create_task(self._begin(pending))
        elif key.group in self._pending:
            self._pending[key.group].rollout_slots.append(rollout_slot)
        elif (group := self._open.get(key.group)) is not None and key.number in group.numbers:
            rollout_slot.begin()
            group.enter()
            self._tasks.create_task(self._run(group, self._trace(group, key), rollout_slot))
        else:
            return False
        return True

    def _trace(self, group: OpenGroup, key: RolloutKey) -> RolloutTrace:
        trace, queue = self._again.pop(key, (None, None))
        if trace is None:
            return self._traces.begin(group.plan, key.number, self._hold.step, self._waits)
        if queue is not None:
            queue.end()
        return trace

    async def _begin(self, pending: PendingGroup) -> None:
        # Only then its time runs. A buffer without room lets it wait, and what has begun goes on meanwhile.
        full = asyncio.get_running_loop().call_later(FULL_AFTER_S, self._note_full)
        with self._waits.waiting("admission"):
            await self._parts.reporter.announce(pending.planned.key)
        full.cancel()
        self._loads.is_buffer_full = False
        del self._pending[pending.planned.group_id]
        self._loads.may_begin = not self._pending
        if pending.is_closed:
            self._deferral.note_ended(pending.planned.group_id)
            for rollout_slot in pending.rollout_slots:
                rollout_slot.leave()
            self._policy.closed(pending.planned.group_id)
            self._num_going -= 1
        else:
            self._add(OpenGroup(self._parts.plan, pending.planned, self._parts.clock, self._hold))
            self._admitted += pending.rollout_slots
        self.changed.notify()

    def _note_full(self) -> None:
        self._loads.is_buffer_full = True
        self.changed.notify()

    def _add(self, group: OpenGroup) -> None:
        self._open.add(group)
        self._tasks.create_task(self._expire(group))

    async def _expire(self, group: OpenGroup) -> None:
        """Close the group at its deadline."""
        # The server counts the same time and mostly says so before; slime's buffer never does.
        if await group.wait_expired():
            logger.warning("group %s of instance %r took too long", group.group_id, group.key[0])
            self._open.close(group)
        if self._open.remove(group):
            self._deferral.note_ended(group.group_id)
        self._num_going -= 1
        self.changed.notify()

    # --- what ends, or begins once more

    def close_id(self, group_id: str) -> None:
        """The buffer has closed this group."""
        if group_id in self._pending:
            self._pending[group_id].is_closed = True
        self._feed.drop(group_id)
        self._open.close_id(group_id)

    def begin_afresh(self, group: OpenGroup) -> None:
        """Throw away the rollouts in flight; others take their slots in the next step."""
        self._feed.submit(self._renewed(group, group.afresh()).plan, is_open=True)

    def put_off(self, group: OpenGroup) -> None:
        """Throw away all that there is of the group; it begins afresh in a later step."""
        if not self._deferral.waits(group):
            self._deferral.put_off(self._renewed(group, group.afresh(is_whole=True)))

    def _renewed(self, group: OpenGroup, fresh: OpenGroup) -> OpenGroup:
        # The free slots are the fresh one's by now, so that a rollout which ends meanwhile fills none.
        self._open.end_rest(group)
        self._num_going += 1
        self._add(fresh)
        return fresh

    def wait_again(self, group: OpenGroup, key: RolloutKey, trace: RolloutTrace) -> None:
        """A rollout that is broken or lost waits for its policy to choose it once more."""
        if not group.is_finished:
            trace.next_attempt(self._hold.step, "lost" if trace.ending == "lost" else "broken")
            self._again[key] = trace, trace.attempt.begin("queue")

    def waits_again(self, key: RolloutKey) -> bool:
        """Whether a rollout does."""
        return key in self._again

    def forget(self, group: OpenGroup) -> None:
        """Nothing of a group is started any more."""
        self._policy.closed(group.group_id)
        for number in group.numbers:
            trace, queue = self._again.pop(RolloutKey(group.group_id, number), (None, None))
            if trace is not None and queue is not None:
                queue.end()
                trace.ending = "aborted"
                trace.end()
        self.changed.notify()
