"""What time brings about in a run. Every time-out of the buffer is here, and each counts in a way of its own:

- ``group_timeout_seconds`` after its last sample, or ``group_deadline_seconds`` after it opened, an open group is
  closed: delivered with what is there if that is enough (salvaged), else discarded;
- ``lease_s`` after its reply, a lease expires, and its groups are ready again;
- ``group_deadline_seconds`` without progress, the run is reported as stalled;
- ``group_timeout_seconds`` after its process and its last sample, the run ends.

All but leases count the run's active seconds, which stand still while it is paused or waits for its engine, and go on
after a restart. A lease is the trainer's time, which goes on whatever the run does. Of a group only the time counts in
which one of its rollouts is in flight, where its run process says so (``idle_groups.py``).
"""

import heapq
import logging
from collections.abc import Sequence

from forebay.buffer.groups.alarm import alarm_text
from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.idle_groups import idle_until_s
from forebay.buffer.leases.leases import Leases
from forebay.buffer.reads.judging import GroupJudge
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.group import BatchState, DiscardReason, GroupState
from forebay.core.run import WORKING, RunSettings, RunState

logger = logging.getLogger(__name__)

TICK_RECORD_S = 5.0
"""How much of the counted time a crash may lose."""


def expire_leases(leases: Leases) -> None:
    """Make the groups of leases ready again whose time is up."""
    now_s = leases.buffer.monotonic()
    # A copy, since giving one back takes it out.
    for lease in list(leases.held.values()):
        # While a reply with the batch goes out, its time has not begun: `patience_s` bounds that.
        if lease.until_s <= now_s and not lease.num_readers and not leases.buffer.has_failed:
            leases.buffer.record(*leases.give_back(lease, BatchState.EXPIRED, may_be_known=True))


class Deadlines:
    """When the open groups of one run are closed, and when the run ends."""

    def __init__(self, buffer: RunBuffer, group_judge: GroupJudge) -> None:
        self._buffer = buffer
        self._group_judge = group_judge
        self._due: list[tuple[float, str]] = []
        """A heap. A group may be in it several times, and have another deadline by then."""
        self._made_for: tuple[RunSettings, float | None] | None = None
        """What the deadlines in the heap follow from, beside the groups: another start of the run has other ones."""
        self._recorded_s = buffer.active.now_s()
        self._is_alarmed = False

    async def advance(self) -> None:
        """Do what is due in the run. Raises ``StorageFailed`` when its end cannot be stored."""
        buffer, run = self._buffer, self._buffer.run
        if run.has_ended or buffer.has_failed:
            return
        self._record_time()
        self._schedule()
        is_any_due = bool(self._due) and self._due[0][0] <= buffer.active.now_s()
        if is_any_due or run.state not in WORKING:
            async with buffer.lock:
                buffer.check_storage()  # it may have failed while the lock was waited for
                await self._close(self._overdue())
                if run.state not in WORKING:
                    await self._close_after_process()
        self._watch_progress()
        if self._is_over():
            # Before it is stored: a write in between must already be late.
            run.has_ended = True
            # Late samples bear the time at which the run ended.
            buffer.active.run(False)
            await buffer.save_run()
            buffer.hooks.notify("run_ended", run_id=run.run_id, state=run.state.value, reason=run.reason)
            logger.info("run %s (%s) has ended: %s", run.run_id, run.task_type, run.state.value)

    def _record_time(self) -> None:
        """Store every few seconds the deadlines' time and the run's counts: a crash loses no more of them."""
        now_s = self._buffer.active.now_s()
        if now_s - self._recorded_s >= TICK_RECORD_S and self._buffer.groups.is_any(GroupState.OPEN):
            self._recorded_s = now_s
            self._buffer.record(*self._buffer.run_rows())

    # --- open groups

    def due_s(self, group: SampleGroup) -> float:
        """When the group is closed at the latest, in active seconds; later if its process speaks meanwhile.

        Without a process that could still write, a group without samples waits no longer than one with some.
        """
        settings, row, until_s = self._buffer.groups.settings, group.row, idle_until_s(self._buffer)
        due = row.opened_s + group.idle_seconds(until_s) + settings.group_deadline_seconds
        last = self._buffer.run.process_ended_s if row.last_sample_s is None else group.timeout_from(until_s)
        return due if last is None else min(due, last + settings.group_timeout_seconds)

    def _schedule(self) -> None:
        """Bring the heap up to date: it is looked at here only, so that a write need not."""
        groups = self._buffer.groups
        made_for = (groups.settings, self._buffer.run.process_ended_s)
        if self._made_for != made_for:
            # Deadlines may come earlier by this, and what is found too late in the heap is closed too late.
            self._made_for = made_for
            self._due = [(self.due_s(group), group.group_id) for group in groups.in_state(GroupState.OPEN)]
            heapq.heapify(self._due)
        else:
            for group in groups.unscheduled:
                heapq.heappush(self._due, (self.due_s(group), group.group_id))
            # Groups leave it when their time comes, which may be an hour after they were closed: by then they are many.
            if len(self._due) > 4 * groups.states[GroupState.OPEN] + 1024:
                self._due = [(self.due_s(group), group.group_id) for group in groups.in_state(GroupState.OPEN)]
                heapq.heapify(self._due)
        groups.unscheduled.clear()

    def _overdue(self) -> list[SampleGroup]:
        """The open groups whose deadline has passed. They leave the heap."""
        now_s, found = self._buffer.active.now_s(), dict[str, SampleGroup]()
        while self._due and self._due[0][0] <= now_s:
            key = heapq.heappop(self._due)[1]
            group = self._buffer.groups.by_id.get(key)
            if group is None or group.state is not GroupState.OPEN or key in found:
                continue
            due = self.due_s(group)
            if due <= now_s:
                found[key] = group
            else:  # since it was put there samples came, or it did not age
                heapq.heappush(self._due, (due, key))
        return list(found.values())

    async def _close(self, groups: Sequence[SampleGroup]) -> None:
        """Close open groups: deliver what is enough, discard the rest."""
        try:
            for group in groups:
                if group.state is GroupState.OPEN:
                    await self._close_one(group)
        finally:  # whatever stopped it, the deadline of a group that is still open must be found again
            self._buffer.groups.unscheduled += [group for group in groups if group.state is GroupState.OPEN]

    async def close_short(self, group: SampleGroup, *, was_salvaged: bool) -> None:
        """Close an open group now, as if its time were up. Called with the run's lock held.

        ``was_salvaged``: nobody had found it valid until then, and nobody is asked, as long as it is enough. Groups
        that were full before it are judged first, so that they keep their places in the order of delivery.
        """
        groups = self._buffer.groups
        if was_salvaged:
            groups.changed.pop(group.group_id, None)
        await self._group_judge.evaluate()
        if was_salvaged and group.state is GroupState.OPEN:
            groups.short_valid.pop(group.group_id, None)
            groups.changed[group.group_id] = group
        await self._close([group])

    async def _close_one(self, group: SampleGroup) -> None:
        buffer, groups, settings = self._buffer, self._buffer.groups, self._buffer.run.settings
        is_full, num_samples, num_completed = groups.is_full(group), len(group.samples), group.num_completed
        is_enough = num_completed / settings.group_size >= settings.min_timeout_group_size_ratio
        is_asked = is_full or not is_enough or num_samples >= settings.min_valid_group_size
        # Any other short group that is enough goes out without being asked about; slime's buffer does the same.
        if group.group_id in groups.changed and is_asked:
            await self._group_judge.judge_changed(group)
        if group.state is not GroupState.OPEN or len(group.samples) != num_samples:
            return  # it was closed by that, or a sample came while the hook was asked
        if num_completed >= settings.min_valid_group_size and self._are_rewards_equal(group):
            buffer.move(group, GroupState.DISCARDED, DiscardReason.INVALID)
        elif num_completed and (is_enough or group.group_id in groups.short_valid):
            group.row.is_salvaged = group.group_id not in groups.short_valid
            await self._group_judge.make_ready(group)
        else:
            failed = f"; failed: {group.failures_text()}" if group.row.num_failed else ""
            detail = f"{num_completed} of {settings.group_size} samples had come{failed}"
            buffer.move(group, GroupState.DISCARDED, DiscardReason.TIMED_OUT, detail)

    def _are_rewards_equal(self, group: SampleGroup) -> bool:
        """Whether the built-in ``is_valid_group`` of contract A did not take a group that has samples enough for it."""
        hooks = self._buffer.hooks
        is_built_in = not hooks.in_host("judge") and hooks.contract != "B"
        return is_built_in and group.group_id not in self._buffer.groups.short_valid

    # --- the run

    async def _close_after_process(self) -> None:
        """Judge what is full, and close what the generator has said it will not fill."""
        await self._group_judge.evaluate()
        run = self._buffer.run
        if run.state is RunState.FINISHED and run.is_last_slot_reported:
            await self._close(self._buffer.groups.in_state(GroupState.OPEN))

    def _is_over(self) -> bool:
        buffer, run = self._buffer, self._buffer.run
        if run.state in WORKING or buffer.groups.is_any(GroupState.OPEN):
            return False
        if run.state is not RunState.FINISHED or run.is_last_slot_reported:
            return True
        # A `run_rollout` may have handed its work to others and returned: they have as long as a group has.
        last_s = max(run.process_ended_s or 0.0, buffer.last_sample_s)
        return buffer.active.now_s() - last_s >= run.settings.group_timeout_seconds

    def _watch_progress(self) -> None:
        buffer, run = self._buffer, self._buffer.run
        alarm, at_least = buffer.groups.alarm, run.settings.alarm_after_groups
        is_alarmed = alarm.num_in_a_row >= at_least
        if is_alarmed and not self._is_alarmed:
            logger.warning("run %s: %s", run.run_id, alarm_text(alarm.reasons(at_least) or {}))
        self._is_alarmed = is_alarmed
        idle_s = buffer.active.now_s() - buffer.last_progress_s
        if run.state is RunState.RUNNING and not buffer.is_stalled:
            buffer.is_stalled = idle_s >= run.settings.group_deadline_seconds
            if buffer.is_stalled:
                logger.warning("run %s made no progress for %.0f s", run.run_id, idle_s)
