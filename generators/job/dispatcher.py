"""Starts the rollouts that the policy chooses: announces groups before their first rollout, and assigns slots."""

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
"""Longest wait before engines are checked again: one may be back, or new behind its router."""

FULL_AFTER_S = 2.0
"""The buffer counts as full once an announcement takes this long; normally it takes milliseconds."""

STUCK_S = 300.0
"""Limit for a policy that starts nothing. Idle groups do not age, so nothing else would end such a run."""

RunRollout = Callable[[OpenGroup, RolloutTrace, RolloutSlot], Coroutine[Any, Any, None]]


class PolicyStuck(RuntimeError):
    """A policy keeps groups waiting although engines are free, which is an error in the policy."""


@dataclass
class PendingGroup:
    """A group being announced to the buffer, and its rollouts chosen meanwhile."""

    planned: GroupPlan
    rollout_slots: list[RolloutSlot] = field(default_factory=list)
    is_closed: bool = False


class Dispatcher:
    """Asks the policy for a rollout whenever a slot is free, and starts it."""

    def __init__(
        self, parts: JobParts, feed: GroupFeed, deferral: Deferral, open_groups: OpenGroups, run: RunRollout
    ) -> None:
        self._parts = parts
        self._policy, self._loads, self._hold, self._traces = parts.policy, parts.loads, parts.hold, parts.traces
        self._feed, self._deferral, self._open, self._run = feed, deferral, open_groups, run
        self._waits = QueueWait(parts.traces.tracer)
        self.changed = Signal()
        """Notified when a rollout may be startable."""
        self._pending: dict[str, PendingGroup] = {}
        """Groups being announced, by id. Only one at a time if the policy respects ``may_begin``."""
        self._admitted: deque[RolloutSlot] = deque()
        """Rollouts chosen while their group was being announced; they get the next slots."""
        self._again: dict[RolloutKey, tuple[RolloutTrace, SpanHandle]] = {}
        """Capped and lost rollouts that wait to be chosen again."""
        self._num_going = 0
        """Groups that have begun and not ended."""
        self._stuck_from_s = math.inf
        self._tasks: asyncio.TaskGroup

    async def start_all(self, tasks: asyncio.TaskGroup) -> None:
        """Start rollouts as ``tasks`` until every group has ended."""
        self._tasks = tasks
        self._stuck_from_s = asyncio.get_running_loop().time() + STUCK_S
        while self._has_groups:
            if self._feed.is_expecting and not self._num_going:
                await self._wait_expected()
                continue
            await self._wait_startable()
            if self._hold.is_held:  # all groups have ended meanwhile, so weights may never be announced again
                continue
            self._feed.refill()
            rollout_slot = self._chosen()
            if rollout_slot is None:
                await self._wait_changed()
            elif not self._start(rollout_slot):
                rollout_slot.leave()
                await asyncio.sleep(0)  # else a policy that keeps choosing this one would block the event loop

    # --- starting

    @property
    def _has_groups(self) -> bool:
        return bool(self._num_going) or not self._feed.is_empty

    async def _wait_startable(self) -> None:
        """Wait until a runner is ready, an engine answers and the run is not paused, or no groups are left."""
        begun_s = asyncio.get_running_loop().time()
        with self._waits.waiting("queue"):
            await self._parts.runner.when_ready()
        with self._waits.waiting("engine_wait"), suppress(TimeoutError):
            await self._wait_engine()
        with self._waits.waiting("hold"):
            while self._hold.is_held and self._has_groups:
                await self.changed.wait()
        self._stuck_from_s += asyncio.get_running_loop().time() - begun_s  # waits are not the policy's fault

    async def _wait_engine(self) -> None:
        """Wait for an engine. Raises ``TimeoutError`` if all groups end before one answers."""
        async with asyncio.timeout(None) as limit:
            self._closing = asyncio.get_running_loop().call_later(self._hold.engine_wait_s, self._close_stranded, limit)
            try:
                answering = await self._parts.pool.when_up()
            finally:
                self._closing.cancel()
        for url in self._loads.set_engines(answering):
            self._policy.engine_lost(url)

    def _close_stranded(self, limit: asyncio.Timeout) -> None:
        """Close idle groups because no engine has answered for too long, and repeat this every few seconds."""
        loop = asyncio.get_running_loop()
        self._closing = loop.call_later(LOOK_AGAIN_S, self._close_stranded, limit)
        if not self._has_groups:
            limit.reschedule(loop.time())
        for group in self._open.unfinished():
            if group.is_idle:
                logger.warning("group %s of instance %r closed: no engine answers", group.group_id, group.key[0])
                self._open.close_incomplete(group)

    async def _wait_expected(self) -> None:
        """Wait for groups without waiting for an engine, because perhaps no rollout will be needed."""
        begun_s = asyncio.get_running_loop().time()
        await self.changed.wait()
        self._stuck_from_s += asyncio.get_running_loop().time() - begun_s

    async def _wait_changed(self) -> None:
        self._check_policy()
        # For a group being announced, the wait is recorded as "write" or "admission".
        with nullcontext() if self._pending else self._waits.waiting("queue"):
            await self.changed.wait(LOOK_AGAIN_S)

    def _check_policy(self) -> None:
        """Raise ``PolicyStuck`` if the policy has started nothing for ``STUCK_S`` although it could."""
        now_s = asyncio.get_running_loop().time()
        if self._loads.total or self._pending:
            self._stuck_from_s = now_s + STUCK_S
        elif now_s > self._stuck_from_s:
            raise PolicyStuck(
                f"{type(self._policy).__name__} has started nothing for {STUCK_S:g} s although groups are waiting"
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
        """Slots kept for a group being announced; none if the buffer is full, which only other groups can change."""
        return 0 if self._loads.is_buffer_full else sum(len(each.rollout_slots) for each in self._pending.values())

    def _start(self, rollout_slot: RolloutSlot) -> bool:
        """Start a rollout. Returns False if its group has closed since it was chosen."""
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
        # The group's time starts after the announcement. A full buffer delays it, while other groups continue.
        full = asyncio.get_running_loop().call_later(FULL_AFTER_S, self._note_full)
        with self._waits.waiting("write") as rename:
            await self._parts.reporter.announce(
                pending.planned.key, lambda is_full: rename("admission" if is_full else "write")
            )
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
        # The server counts the same time and usually closes the group first; slime's buffer never does.
        if await group.wait_expired():
            logger.warning("group %s of instance %r closed: it timed out", group.group_id, group.key[0])
            self._open.close(group)
        if self._open.remove(group):
            self._deferral.note_ended(group.group_id)
        self._num_going -= 1
        self.changed.notify()

    # --- ending and restarting

    def close_id(self, group_id: str) -> None:
        """Close a group that the buffer has closed."""
        if group_id in self._pending:
            self._pending[group_id].is_closed = True
        self._feed.drop(group_id)
        self._open.close_id(group_id)

    def begin_afresh(self, group: OpenGroup) -> None:
        """Discard a group's rollouts in flight. New rollouts fill the slots in the next step."""
        self._feed.submit(self._renewed(group, group.afresh()).plan, is_open=True)

    def put_off(self, group: OpenGroup) -> None:
        """Discard all rollouts of a group, which restarts in a later step."""
        if not self._deferral.waits(group):
            self._deferral.put_off(self._renewed(group, group.afresh(is_whole=True)))

    def _renewed(self, group: OpenGroup, fresh: OpenGroup) -> OpenGroup:
        # `fresh` owns the free slots already, so that a rollout that ends now fills none.
        self._open.end_rest(group)
        self._num_going += 1
        self._add(fresh)
        return fresh

    def wait_again(self, group: OpenGroup, key: RolloutKey, trace: RolloutTrace) -> None:
        """Let a capped or lost rollout wait until the policy chooses it again."""
        if not group.is_finished:
            trace.next_attempt(self._hold.step, "lost" if trace.ending == "lost" else "broken")
            self._again[key] = trace, trace.attempt.begin("queue")

    def waits_again(self, key: RolloutKey) -> bool:
        """Whether a rollout waits to be chosen again."""
        return key in self._again

    def forget(self, group: OpenGroup) -> None:
        """Start no more rollouts of a group."""
        self._policy.closed(group.group_id)
        for number in group.numbers:
            trace, queue = self._again.pop(RolloutKey(group.group_id, number), (None, None))
            if trace is not None and queue is not None:
                queue.end()
                trace.ending = "aborted"
                trace.end()
        self.changed.notify()
