"""Reporting to the buffer how far the run is and what its rollouts cost, and a log line now and then."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.core.clock import ActiveClock
from forebay.generators.buffer_link.abc import GroupKey, Link, ProgressReport
from forebay.generators.rollouts.open_group import Execution

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
COUNTS_EVERY_S = 5.0
"""Each report of counts is written to the journal; so much may be lost with a process that is killed."""


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


class Reporter:
    """Announces groups before their first rollout, and reports what changes.

    The ``clock`` of the groups' deadlines stands still while the run waits for its engine or its trainer, or is paused.
    """

    def __init__(self, link: Link, clock: ActiveClock) -> None:
        self.totals = Totals()
        self._link = link
        self._clock = clock
        self._process_id = secrets.token_hex(4)
        self._is_waiting_for_engine = False
        self._is_held = False
        self._is_paused = False
        self._is_count_due = False
        self._changed = asyncio.Event()
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

    def note_waiting(self, is_waiting: bool) -> None:
        """The circuit breaker opened or closed; reported as soon as possible."""
        self._is_waiting_for_engine = is_waiting
        self._note_standstill()

    def note_held(self, is_held: bool) -> None:
        """The run is held until its trainer announces other weights, or goes on; reported as soon as possible."""
        self._is_held = is_held
        self._note_standstill()

    def note_paused(self, is_paused: bool) -> None:
        """The engines are paused, or go on, as the server says."""
        self._is_paused = is_paused
        self._run_clock()

    def _note_standstill(self) -> None:
        self._run_clock()
        self._changed.set()

    def _run_clock(self) -> None:
        self._clock.run(not (self._is_waiting_for_engine or self._is_held or self._is_paused))

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
            progress = ProgressReport(
                is_waiting_for_engine=self._is_waiting_for_engine,
                is_held=self._is_held,
                num_groups_total=self.totals.num_groups_total,
                is_last_slot_reported=is_last_slot_reported,
                process_id=self._process_id,
                counts=dict(self.totals.counts),
            )
            await self._link.report(progress)


Ending = Literal["finished", "failed", "aborted"]
"""Its sample is used; it failed; or nobody needed it any more."""


def cost(attempts: Sequence[Execution], ending: Ending) -> Counter[str]:
    """What one rollout adds to the counts. Attempts before the last one failed; one that never began costs nothing."""
    if not attempts:
        return Counter()
    *before, last = attempts
    counts = Counter({f"rollouts_{ending}": 1, f"tokens_{ending}": last.num_sampled_tokens})
    counts["tokens_failed"] += sum(attempt.num_sampled_tokens for attempt in before)
    if ending == "finished":
        counts.update({f"capture_{name}": number for name, number in last.trajectory.counters.items()})
    return counts


def kept_costs(rollouts: Iterable[Sequence[Execution]]) -> Counter[str]:
    """What is kept of rollouts in flight until the next step; those that sampled nothing yet do not count."""
    tokens = [attempts[-1].num_sampled_tokens for attempts in rollouts if attempts]
    return Counter(rollouts_held=sum(1 for number in tokens if number), tokens_held=sum(tokens))
