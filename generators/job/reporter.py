"""Reporting to the buffer: how far the run is, what its rollouts cost, and which groups are idle."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from forebay.core.clock import ActiveClock
from forebay.generators.buffer_link.abc import GroupKey, JobBuffer, ProgressReport, WorkerReport
from forebay.generators.rollouts.open_group import OpenGroup

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
WORKERS_EVERY_S = 2.0
COUNTS_EVERY_S = 5.0
"""Each report of counts is written to the journal; so much may be lost with a process that is killed."""
IDLE_LASTING_S = 0.1
"""A rollout often follows the one before at once: what changes back within this time is not told."""
IDLE_REPEAT_S = 60.0
"""The buffer trusts a process of which it hears: with groups that it has told idle, it reports at least so often."""


@dataclass
class Totals:
    """What a run process has done so far."""

    num_groups_opened: int = 0
    num_groups_closed: int = 0
    """Groups that were closed before their last rollout ended."""
    num_completed: int = 0
    num_failed: int = 0
    num_groups_total: int | None = None
    is_stopped: bool = False
    """Whether it ended because the buffer wanted nothing more."""
    counts: Counter[str] = field(default_factory=Counter)
    """Whatever else is counted, by name."""


class IdleReports:
    """What the buffer is told of groups without a rollout in flight, so that it does not let them age meanwhile.

    It compares how groups are with what the buffer knows of them: an announced group counts as busy until the buffer is
    told otherwise. ``on_due`` is called when there is something to report.
    """

    def __init__(self, on_due: Callable[[], object]) -> None:
        self._on_due = on_due
        self._reported: set[GroupKey] = set()
        """The groups that are idle for the buffer."""
        self._new: dict[GroupKey, OpenGroup] = {}
        self._lasting: dict[GroupKey, OpenGroup] = {}
        """Those that changed before the timer was set: they are looked at when it fires."""
        self._due: dict[GroupKey, OpenGroup] = {}
        self._is_timed = False

    @property
    def repeat_s(self) -> float | None:
        """How long nothing may be reported; None for ever."""
        return IDLE_REPEAT_S if self._reported else None

    def note_announced(self, key: GroupKey) -> None:
        """The buffer takes a group for busy."""
        self._reported.discard(key)

    def note_announced_idle(self, key: GroupKey) -> None:
        """The buffer takes a group for idle, of which nothing runs here."""
        self._reported.add(key)
        self._on_due()  # from now on something is to be told from time to time

    def note(self, group: OpenGroup) -> None:
        """A group has opened, or has another state perhaps; of the same key the last one counts."""
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
        """What is to be told now, and counts as told: the groups that are idle, and those that are not any more."""
        changed = [(key, group.is_idle) for key, group in self._due.items() if self._differs(key, group)]
        self._due.clear()
        idle, busy = ([key for key, is_idle in changed if is_idle is wanted] for wanted in (True, False))
        self._reported.update(idle)
        self._reported.difference_update(busy)
        return idle, busy

    def _differs(self, key: GroupKey, group: OpenGroup) -> bool:
        return group.is_idle != (key in self._reported)


class Reporter:
    """Announces groups before their first rollout, and reports what changes.

    The ``clock`` of the groups' deadlines stands still while the run waits for its engine or its trainer, or is paused.
    """

    def __init__(self, link: JobBuffer, clock: ActiveClock) -> None:
        self.totals = Totals()
        self._link = link
        self._clock = clock
        self._process_id = secrets.token_hex(4)
        self._waiting: set[int | None] = set()
        """Workers that no engine answers; None for this process."""
        self._has_no_worker = False
        self._workers: Callable[[], Sequence[WorkerReport]] | None = None
        self._is_held = False
        self._is_still = False
        self._is_count_due = False
        self._changed = asyncio.Event()
        self._idle = IdleReports(self._changed.set)
        # The first report tells how many groups there will be.
        self._changed.set()
        # The server takes what came last for true: reports must not overtake each other.
        self._sending = asyncio.Lock()
        self._logged_s = time.monotonic()

    async def announce(self, key: GroupKey) -> None:
        """A group opens: returns when the buffer knows it. A buffer without room lets us wait here."""
        self.totals.num_groups_opened += 1
        # By itself, for it may be refused for minutes: meanwhile other reports must neither wait nor grow old.
        await self._link.report(ProgressReport(opened=[key]))
        self._idle.note_announced(key)

    async def announce_idle(self, key: GroupKey) -> None:
        """A group opens for samples that need no rollout: it does not age until it is announced for others."""
        await self._link.report(ProgressReport(opened=[key], idle=[key]))
        self._idle.note_announced_idle(key)

    async def announce_incomplete(self, key: GroupKey) -> None:
        """No sample comes any more for a group with empty slots, and what there is of it is stored."""
        await self._link.report(ProgressReport(short=[key]))

    def note_waiting(self, is_waiting: bool, worker: int | None = None) -> None:
        """The circuit breaker opened or closed, of this process or a worker; reported as soon as possible."""
        (self._waiting.add if is_waiting else self._waiting.discard)(worker)
        self._note_standstill()

    def note_no_worker(self, has_no_worker: bool) -> None:
        """There is no worker at all, or there is one again."""
        self._has_no_worker = has_no_worker
        self._run_clock()

    def note_held(self, is_held: bool) -> None:
        """The run is held until its trainer announces other weights, or goes on; reported as soon as possible."""
        self._is_held = is_held
        self._note_standstill()

    def note_still(self, is_still: bool) -> None:
        """The server's deadlines are paused, or count: for paused engines, say, or an outage that the gateway found."""
        self._is_still = is_still
        self._run_clock()

    def _note_standstill(self) -> None:
        self._run_clock()
        self._changed.set()

    def _run_clock(self) -> None:
        self._clock.run(not (self._waiting or self._has_no_worker or self._is_held or self._is_still))

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to what the run counts; reported within 5 s, and at the end."""
        self.totals.counts.update(counts)
        if not self._is_count_due and any(counts.values()):
            self._is_count_due = True
            asyncio.get_running_loop().call_later(COUNTS_EVERY_S, self._changed.set)

    def note_sample(self, is_failed: bool) -> None:
        """A rollout ended with a sample. Logs a line when the last one is 10 s old."""
        self.totals.num_failed += is_failed
        self.totals.num_completed += not is_failed
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self.log()

    def note_group(self, group: OpenGroup) -> None:
        """A group has opened, is idle, or is not any more: reported soon, unless that changes back."""
        self._idle.note(group)

    def watch_workers(self, report: Callable[[], Sequence[WorkerReport]]) -> None:
        """The run has workers: how they are is reported every few seconds."""
        self._workers = report

    def flush(self) -> None:
        """Report what was counted now."""
        self._changed.set()

    def log(self) -> None:
        """Write the line."""
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
            self._changed.clear()  # before it is sent: what changes meanwhile is sent once more
            await self._send()

    async def finish(self) -> None:
        """Everything was written: report that no sample comes any more."""
        await self._send(is_last_slot_reported=True)
        self.log()

    async def _send(self, *, is_last_slot_reported: bool = False) -> None:
        async with self._sending:
            # Before the counts are read: what is counted while they are under way makes others due.
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
