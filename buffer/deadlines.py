"""All time-outs of the buffer:

- An open group is closed ``group_timeout_seconds`` after its last sample, or ``group_deadline_seconds`` after it
  opened. It is delivered if it has enough samples (salvaged), otherwise discarded.
- A lease expires ``lease_s`` after its reply, and its groups are ready again.
- A run is reported as stalled after ``group_deadline_seconds`` without progress.
- A run ends ``group_timeout_seconds`` after its process ended and its last sample.

All except leases count the run's active seconds, which stop while it is paused or waits for its engine, and continue
after a restart. A lease counts the trainer's time, whatever the run does. If its run process reports it, a group
counts only time with one of its rollouts in flight (``idle_groups.py``).
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
"""Maximum seconds of counted time that a crash may lose."""


def expire_leases(leases: Leases) -> None:
    """Make the groups of expired leases ready again."""
    now_s = leases.buffer.monotonic()
    # A copy, because expiring a lease removes it.
    for lease in list(leases.held.values()):
        # While a reply with the batch is being sent, its time does not run; `patience_s` bounds that.
        if lease.until_s <= now_s and not lease.num_readers and not leases.buffer.has_failed:
            leases.buffer.record(*leases.give_back(lease, BatchState.EXPIRED, may_be_known=True))


class Deadlines:
    """Closes one run's open groups in time, and ends the run."""

    def __init__(self, buffer: RunBuffer, group_judge: GroupJudge) -> None:
        self._buffer = buffer
        self._group_judge = group_judge
        self._due: list[tuple[float, str]] = []
        """A heap. It may contain a group several times, and with an outdated deadline."""
        self._made_for: tuple[RunSettings, float | None] | None = None
        """What the heap's deadlines depend on besides the groups; another start of the run changes it."""
        self._recorded_s = buffer.active.now_s()
        self._is_alarmed = False

    async def advance(self) -> None:
        """Apply what is due in the run. Raises ``StorageFailed`` if the run's end cannot be stored."""
        buffer, run = self._buffer, self._buffer.run
        if run.has_ended or buffer.has_failed:
            return
        self._record_time()
        self._schedule()
        is_any_due = bool(self._due) and self._due[0][0] <= buffer.active.now_s()
        if is_any_due or run.state not in WORKING:
            async with buffer.lock:
                buffer.check_storage()  # the storage may have failed while this waited for the lock
                await self._close(self._overdue())
                if run.state not in WORKING:
                    await self._close_after_process()
        self._watch_progress()
        if self._is_over():
            # Set before it is stored, because a write in between must already be late.
            run.has_ended = True
            # Late samples get the time at which the run ended.
            buffer.active.run(False)
            await buffer.save_run()
            buffer.hooks.notify("run_ended", run_id=run.run_id, state=run.state.value, reason=run.reason)
            logger.info("run %s (%s) has ended: %s", run.run_id, run.task_type, run.state.value)

    def _record_time(self) -> None:
        """Store the active time and the run's counts every few seconds, so that a crash loses no more."""
        now_s = self._buffer.active.now_s()
        if now_s - self._recorded_s >= TICK_RECORD_S and self._buffer.groups.is_any(GroupState.OPEN):
            self._recorded_s = now_s
            self._buffer.record(*self._buffer.run_rows())

    # --- open groups

    def due_s(self, group: SampleGroup) -> float:
        """The group's latest closing time in active seconds; its process may postpone it.

        Once no process can still write, a group without samples waits no longer than one with some.
        """
        settings, row, until_s = self._buffer.groups.settings, group.row, idle_until_s(self._buffer)
        due = row.opened_s + group.idle_seconds(until_s) + settings.group_deadline_seconds
        last = self._buffer.run.process_ended_s if row.last_sample_s is None else group.timeout_from(until_s)
        return due if last is None else min(due, last + settings.group_timeout_seconds)

    def soonest(self, limit: int) -> list[tuple[float, SampleGroup]]:
        """The open groups that close first, as of the last tick, each with its closing time in active seconds."""
        found, due = dict[str, SampleGroup](), dict[str, float]()
        while self._due and len(found) < limit:
            at_s, key = heapq.heappop(self._due)
            group = self._buffer.groups.by_id.get(key)
            if group is None or group.state is not GroupState.OPEN:
                continue
            if key not in due and at_s < due.setdefault(key, self.due_s(group)):
                heapq.heappush(self._due, (due[key], key))  # its real place, so that the next call need not look again
            elif at_s >= due[key]:
                found[key] = group
        for key in found:
            heapq.heappush(self._due, (due[key], key))
        return [(due[key], group) for key, group in found.items()]

    def _schedule(self) -> None:
        """Update the heap. This happens only here, so that writes need not."""
        groups = self._buffer.groups
        made_for = (groups.settings, self._buffer.run.process_ended_s)
        if self._made_for != made_for:
            # Deadlines may become earlier, and a group found too late in the heap would be closed too late.
            self._made_for = made_for
            self._due = [(self.due_s(group), group.group_id) for group in groups.in_state(GroupState.OPEN)]
            heapq.heapify(self._due)
        else:
            for group in groups.unscheduled:
                heapq.heappush(self._due, (self.due_s(group), group.group_id))
            # A group leaves the heap at its deadline, maybe an hour after it closed, which accumulates closed groups.
            if len(self._due) > 4 * groups.states[GroupState.OPEN] + 1024:
                self._due = [(self.due_s(group), group.group_id) for group in groups.in_state(GroupState.OPEN)]
                heapq.heapify(self._due)
        groups.unscheduled.clear()

    def _overdue(self) -> list[SampleGroup]:
        """Take the open groups whose deadline has passed from the heap."""
        now_s, found = self._buffer.active.now_s(), dict[str, SampleGroup]()
        while self._due and self._due[0][0] <= now_s:
            key = heapq.heappop(self._due)[1]
            group = self._buffer.groups.by_id.get(key)
            if group is None or group.state is not GroupState.OPEN or key in found:
                continue
            due = self.due_s(group)
            if due <= now_s:
                found[key] = group
            else:  # samples arrived, or it did not age, since it was added
                heapq.heappush(self._due, (due, key))
        return list(found.values())

    async def _close(self, groups: Sequence[SampleGroup]) -> None:
        """Close open groups: deliver those with enough samples, discard the rest."""
        try:
            for group in groups:
                if group.state is GroupState.OPEN:
                    await self._close_one(group)
        finally:  # after an error too, the deadlines of groups that are still open must be scheduled
            self._buffer.groups.unscheduled += [group for group in groups if group.state is GroupState.OPEN]

    async def close_short(self, group: SampleGroup, *, was_salvaged: bool) -> None:
        """Close an open group now, as if its deadline had passed. Requires the run's lock.

        ``was_salvaged``: it had not been found valid, and no hook is asked if it has enough samples. Groups
        that were full before it are judged first, so that they keep their positions in the order of delivery.
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
        # Any other incomplete group with enough samples is delivered without asking; slime's buffer does the same.
        if group.group_id in groups.changed and is_asked:
            await self._group_judge.judge_changed(group)
        if group.state is not GroupState.OPEN or len(group.samples) != num_samples:
            return  # that closed it, or a sample arrived while the hook ran
        if num_completed >= settings.min_valid_group_size and self._are_rewards_equal(group):
            buffer.move(group, GroupState.DISCARDED, DiscardReason.INVALID)
        elif num_completed and (is_enough or group.group_id in groups.short_valid):
            group.row.is_salvaged = group.group_id not in groups.short_valid
            await self._group_judge.make_ready(group)
        else:
            failed = f"; failed: {group.failures_text()}" if group.row.num_failed else ""
            detail = f"{num_completed} of {settings.group_size} samples arrived{failed}"
            buffer.move(group, GroupState.DISCARDED, DiscardReason.TIMED_OUT, detail)

    def _are_rewards_equal(self, group: SampleGroup) -> bool:
        """Whether contract A's built-in ``is_valid_group`` rejected a group that has enough samples."""
        hooks = self._buffer.hooks
        is_built_in = not hooks.in_host("judge") and hooks.contract != "B"
        return is_built_in and group.group_id not in self._buffer.groups.short_valid

    # --- the run

    async def _close_after_process(self) -> None:
        """Judge full groups, and close those that the generator will not fill."""
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
        # `run_rollout` may have handed its work to others and returned, so they get as long as a group has.
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
