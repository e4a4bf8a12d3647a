"""Reports to the buffer: progress, cost of rollouts, and idle groups."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from forebay.core.clock import ActiveClock
from forebay.generators.buffer_link.abc import GroupKey, JobBuffer, NoteFull, ProgressReport, WorkerReport, ignore
from forebay.generators.rollouts.open_group import OpenGroup

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
WORKERS_EVERY_S = 2.0
COUNTS_EVERY_S = 5.0
"""Interval between reports of counts, each of which is journalled. A killed process loses this much at most."""
IDLE_LASTING_S = 0.1
"""Shorter idle times are not reported, because a rollout often follows the previous one at once."""
IDLE_REPEAT_S = 60.0
"""Longest interval between reports while any group is reported idle, to show the buffer that the process is alive."""


@dataclass
class Totals:
    """Totals of a run process so far."""

    num_groups_opened: int = 0
    num_groups_closed: int = 0
    """Groups closed before their last rollout ended."""
    num_completed: int = 0
    num_failed: int = 0
    num_groups_total: int | None = None
    is_stopped: bool = False
    """Whether the job ended because the buffer ended the run."""
    counts: Counter[str] = field(default_factory=Counter)
    """All other counters, by name."""


class IdleReports:
    """Reports of groups without a rollout in flight, so that the buffer pauses their deadlines.

    Compares the state of groups with what was reported; an announced group counts as busy until it is reported idle.
    ``on_due`` is called when a report is due.
    """

    def __init__(self, on_due: Callable[[], object]) -> None:
        self._on_due = on_due
        self._reported: set[GroupKey] = set()
        """Groups last reported as idle."""
        self._new: dict[GroupKey, OpenGroup] = {}
        self._lasting: dict[GroupKey, OpenGroup] = {}
        """Groups that changed before the timer was set; checked when it fires."""
        self._due: dict[GroupKey, OpenGroup] = {}
        self._is_timed = False

    @property
    def repeat_s(self) -> float | None:
        """Longest time without a report, in seconds; None for no limit."""
        return IDLE_REPEAT_S if self._reported else None

    def note_announced(self, key: GroupKey) -> None:
        """Note that a group was announced as busy."""
        self._reported.discard(key)

    def note_announced_idle(self, key: GroupKey) -> None:
        """Note that a group was announced as idle."""
        self._reported.add(key)
        self._on_due()  # starts the periodic reports

    def note(self, group: OpenGroup) -> None:
        """Note that a group has opened or may have changed. A later group with the same key replaces an earlier one."""
        key = group.key
        for noted in (self._due, self._lasting):
            if key in noted:
                noted[key] = group
                return
        self._new[key] = group
        if not self._is_timed:
            self._set_timer()

    def _set_timer(self) -> None:
        self._is_timed = True
        asyncio.get_running_loop().call_later(IDLE_LASTING_S, self._look)

    def _look(self) -> None:
        self._due |= {key: group for key, group in self._lasting.items() if self._differs(key, group)}
        self._lasting, self._new, self._is_timed = self._new, {}, False
        if self._lasting:
            self._set_timer()
        if self._due:
            self._on_due()

    def take(self) -> tuple[Sequence[GroupKey], Sequence[GroupKey]]:
        """Return the groups to report as idle and as busy, and mark them as reported."""
        changed = [(key, group.is_idle) for key, group in self._due.items() if self._differs(key, group)]
        self._due.clear()
        idle, busy = ([key for key, is_idle in changed if is_idle is wanted] for wanted in (True, False))
        self._reported.update(idle)
        self._reported.difference_update(busy)
        return idle, busy

    def _differs(self, key: GroupKey, group: OpenGroup) -> bool:
        return group.is_idle != (key in self._reported)


class Reporter:
    """Announces groups before their first rollout, and reports changes.

    The ``clock`` of the groups' deadlines stops while the run waits for engines, workers or its trainer, or is paused.
    """

    def __init__(self, link: JobBuffer, clock: ActiveClock) -> None:
        self.totals = Totals()
        self._link = link
        self._clock = clock
        self._process_id = secrets.token_hex(4)
        self._waiting: set[int | None] = set()
        """Workers without an answering engine; None stands for this process."""
        self._has_no_worker = False
        self._workers: Callable[[], Sequence[WorkerReport]] | None = None
        self._is_held = False
        self._is_still = False
        self._is_count_due = False
        self._changed = asyncio.Event()
        self._idle = IdleReports(self._changed.set)
        # The first report contains the total number of groups.
        self._changed.set()
        # The server uses the latest report, so reports must not overtake each other.
        self._sending = asyncio.Lock()
        self._logged_s = time.monotonic()

    async def announce(self, key: GroupKey, note_full: NoteFull = ignore) -> None:
        """Announce a group to the buffer, waiting while the buffer is full."""
        self.totals.num_groups_opened += 1
        # Sent separately: it may be rejected for minutes, which must not delay other reports.
        await self._link.report(ProgressReport(opened=[key]), note_full)
        self._idle.note_announced(key)

    async def announce_idle(self, key: GroupKey) -> None:
        """Announce a group for recorded samples. It stays idle until it is announced for rollouts."""
        await self._link.report(ProgressReport(opened=[key], idle=[key]))
        self._idle.note_announced_idle(key)

    async def announce_incomplete(self, key: GroupKey) -> None:
        """Report that a group with empty slots gets no more samples, and that its existing samples are stored."""
        await self._link.report(ProgressReport(short=[key]))

    def note_waiting(self, is_waiting: bool, worker: int | None = None) -> None:
        """Note that the circuit breaker of this process or a worker opened or closed, and report it soon."""
        (self._waiting.add if is_waiting else self._waiting.discard)(worker)
        self._note_standstill()

    def note_no_worker(self, has_no_worker: bool) -> None:
        """Note that all workers are gone, or that one is back."""
        self._has_no_worker = has_no_worker
        self._run_clock()

    def note_held(self, is_held: bool) -> None:
        """Note that the run was paused for its trainer or has resumed, and report it soon."""
        self._is_held = is_held
        self._note_standstill()

    def note_still(self, is_still: bool) -> None:
        """Note whether the server's deadlines are paused, for example because engines are paused or unreachable."""
        self._is_still = is_still
        self._run_clock()

    def _note_standstill(self) -> None:
        self._run_clock()
        self._changed.set()

    def _run_clock(self) -> None:
        self._clock.run(not (self._waiting or self._has_no_worker or self._is_held or self._is_still))

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to the run's counts, which are reported within 5 s and at the end."""
        self.totals.counts.update(counts)
        if not self._is_count_due and any(counts.values()):
            self._is_count_due = True
            asyncio.get_running_loop().call_later(COUNTS_EVERY_S, self._changed.set)

    def note_sample(self, is_failed: bool) -> None:
        """Count a sample. Logs the totals if the last log line is 10 s old."""
        self.totals.num_failed += is_failed
        self.totals.num_completed += not is_failed
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self.log()

    def note_group(self, group: OpenGroup) -> None:
        """Note that a group has opened or may have become idle or busy. Reported soon unless it changes back."""
        self._idle.note(group)

    def watch_workers(self, report: Callable[[], Sequence[WorkerReport]]) -> None:
        """Report the state of the workers every few seconds."""
        self._workers = report

    def flush(self) -> None:
        """Report the counts now."""
        self._changed.set()

    def log(self) -> None:
        """Log the totals."""
        self._logged_s = time.monotonic()
        totals = self.totals
        logger.info(
            "%d of %s groups opened, %d samples completed, %d failed, %d groups closed early",
            totals.num_groups_opened,
            "?" if totals.num_groups_total is None else totals.num_groups_total,
            totals.num_completed,
            totals.num_failed,
            totals.num_groups_closed,
        )

    async def run(self) -> None:
        """Report changes for as long as the run lasts."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._idle.repeat_s if self._workers is None else WORKERS_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()  # before sending, so that changes meanwhile cause another report
            await self._send()

    async def finish(self) -> None:
        """Report that all samples were written and no more will follow."""
        await self._send(is_last_slot_reported=True)
        self.log()

    async def _send(self, *, is_last_slot_reported: bool = False) -> None:
        async with self._sending:
            # Reset before the counts are read: later counts make another report due.
            self._is_count_due = False
            idle, busy = self._idle.take()
            progress = ProgressReport(
                idle=idle,
                busy=busy,
                waiting_for_engine=bool(self._waiting),
                held=self._is_held,
                num_groups_total=self.totals.num_groups_total,
                is_last_slot_reported=is_last_slot_reported,
                process_id=self._process_id,
                counts=dict(self.totals.counts),
                workers=self._workers() if self._workers is not None else None,
            )
            await self._link.report(progress)
