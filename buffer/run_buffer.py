"""One run in the buffer: its groups in memory, and the recording of every change to the store."""

import asyncio
import logging
from asyncio import Future
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from forebay.buffer.batches import Batches
from forebay.buffer.change_records import ChangeRecords, TraceSink
from forebay.buffer.evicted_rows import EvictedRows
from forebay.buffer.groups.groups import Groups
from forebay.buffer.groups.meta_info import MetaWindow
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.buffer.store.abc import Slice, Store
from forebay.core.binary_sample import HEAD_BYTES, as_json, head_of
from forebay.core.clock import ActiveClock, Clock
from forebay.core.errors import ForebayError, StorageFailed
from forebay.core.group import GroupState
from forebay.core.records.rows import Location, Row, RunRow, StartRow
from forebay.core.run import Run, RunState
from forebay.core.waiting import Signal
from forebay.hooks.run_hooks import HookRunner

logger = logging.getLogger(__name__)

AHEAD = "an earlier write failed"


class RunBuffer:
    """A run's groups, clock and hooks. Decisions are made in memory at once, and answered once they are on disk."""

    def __init__(
        self,
        run: Run,
        store: Store,
        clock: Clock,
        hooks: HookRunner,
        remembered_samples: int,
        trace: TraceSink,
        on_failure: Callable[[], None],
        on_change: Callable[[], None],
        *,
        active_s: float,
        is_start_stored: bool = False,
    ) -> None:
        self.run = run
        self._stored_start = run.start if is_start_stored else None
        self.store = store
        self.wall, self.monotonic = clock.wall, clock.monotonic
        self.hooks = hooks
        self.active = ActiveClock(clock, active_s)
        self.trace = trace
        self.changes = ChangeRecords(trace)
        self.groups = Groups(run.run_id, run.settings, self.changes.group_changed, first_epochs=Counter(run.base_skip))
        self.batches = Batches(run.run_id)
        self.window = self.new_window()
        self.gone = EvictedRows(run, self.groups, self.batches, store, remembered_samples)
        self.gone.on_recall = on_change
        self.uids = self.gone.uids
        self.counts, self.outcomes, self.rewards = run.samples, run.outcomes, run.rewards
        self.lock = asyncio.Lock()
        """Held while hooks run and groups are chosen, so that readers take turns."""
        self.news = Signal()
        self.last_progress_s = active_s
        self.last_sample_s = active_s
        self.heard_s = active_s
        """Active seconds when its process last reported on its groups."""
        self.is_stalled = False
        self.workers: list[dict[str, Any]] = []
        """The workers of its process, as last reported."""
        self._logged_losses: set[str] = set()
        """Reasons already logged."""
        self.has_failed = False
        """Set when a change could not be stored: memory is ahead of the disk, and a new object replaces this one."""
        self.pending: dict[str, Future[None]] = {}
        """Samples by uid that the disk does not have yet; each completes when it does."""
        self._on_failure, self._on_change = on_failure, on_change
        self.update_clock()

    # --- recording changes

    def record(self, *rows: Row, body: bytes | memoryview | None = None) -> "Future[Location | None]":
        """Store a change in its current state; refused while memory is ahead of the disk."""
        if self.has_failed:
            return self._refused()
        self._on_change()
        self.changes.rows_changed(rows)
        # Memory is changed already; if this fails, the run is reloaded from the store.
        try:
            stored = self.store.append(rows, body)
        except ForebayError as error:
            self.fail()
            return self._refused(error)
        stored.add_done_callback(self._check)
        return stored

    def _refused(self, error: ForebayError | None = None) -> "Future[Location | None]":
        refused: Future[Location | None] = asyncio.get_running_loop().create_future()
        refused.set_exception(error or StorageFailed(AHEAD))
        refused.exception()  # prevents asyncio's warning if the caller does not await it
        return refused

    def _check(self, stored: "Future[Location | None]") -> None:
        if not stored.cancelled() and stored.exception() is not None:
            self.fail()

    def fail(self) -> None:
        """Refuse all further changes, because one could not be stored, until a recovery has reloaded the run."""
        if not self.has_failed:
            self.has_failed = True
            self._on_failure()

    def check_storage(self) -> None:
        """Raise ``StorageFailed`` while memory is ahead of the disk."""
        if self.has_failed:
            raise StorageFailed(AHEAD)

    def run_rows(self) -> list[Row]:
        """The run's rows to record; its start is included only if it differs from the stored one."""
        run = self.run
        row = RunRow(
            run_id=run.run_id,
            name=run.name,
            task_type=run.task_type,
            state=run.state.value,
            created_at_s=run.created_at_s,
            active_s=self.active.now_s(),
            document=run.document(),
        )
        if self._stored_start is run.start:
            return [row]
        self._stored_start = run.start
        return [row, StartRow(run_id=run.run_id, document=run.start.document())]

    async def save_run(self) -> None:
        """Store the run's current state. Raises ``StorageFailed``."""
        self.update_clock()
        await self.record(*self.run_rows())
        # Readers and followers depend on the run's state too.
        self.news.notify()

    def update_clock(self) -> None:
        """Count active time unless the run is validating, waiting for its engine or trainer, paused, or ended."""
        run = self.run
        is_waiting = run.is_waiting_for_engine or run.is_gateway_waiting or run.is_held or run.is_paused
        is_stopped = run.state is RunState.VALIDATING or (run.state is RunState.RUNNING and is_waiting)
        self.active.run(not is_stopped and not run.has_ended)

    def new_window(self) -> MetaWindow:
        """Create an empty window that remembers samples if a user's meta hook needs them."""
        keep_samples = self.run.settings.meta_max_samples if self.hooks.in_host("meta_info") else 0
        return MetaWindow(keep_samples, ddof=int(self.run.origin == "slime"))

    # --- groups

    def move(self, group: SampleGroup, state: GroupState, reason: str = "", detail: str = "") -> None:
        """Move a group to another state, record it, and notify waiting callers."""
        was_open = group.state is GroupState.OPEN
        if state is GroupState.DISCARDED:
            group.row.weight_version = self.run.weight_version
        # Memory first: the recorded row is the group's state after the move.
        self.groups.move(group, state, self.active.now_s(), reason, detail)
        self.record(group.row)
        if was_open:
            self.notify_closed(group)
        self._tell_losses()
        self.news.notify()

    def _tell_losses(self) -> None:
        """Log each reason for losing too many groups, once per reason."""
        groups, losses = self.groups, self.groups.losses
        if losses.are_too_many(groups.num_closed, groups.settings):
            for cause in losses.counts.keys() - self._logged_losses:
                self._logged_losses.add(cause)
                so_far = f"{losses.counts.total()} of {groups.num_closed} finished groups were lost so far"
                logger.warning("run %s: %s, %s", self.run.run_id, so_far, losses.reason_text(cause, with_detail=False))
        text = losses.samples_text(groups.num_closed, groups.settings)
        if text and "out_of_range" not in self._logged_losses:
            self._logged_losses.add("out_of_range")
            logger.warning("run %s: %s", self.run.run_id, text)

    def notify_closed(self, group: SampleGroup) -> None:
        """Notify plugins that a group accepts no more samples."""
        row = group.row
        self.hooks.notify(
            "group_closed",
            run_id=self.run.run_id,
            group_id=row.group_id,
            instance_id=row.instance_id,
            epoch=row.epoch,
            state=row.state.value,
            reason=row.reason or ("salvaged" if row.is_salvaged else "complete"),
        )

    async def bodies(self, samples: Sequence[Sample]) -> list[bytes]:
        """Return the bodies of ``samples``, in order."""
        # Taken before any await, because a body leaves memory as soon as the disk has it.
        known = [sample.body for sample in samples]
        wanted = [s.location for s, body in zip(samples, known, strict=True) if body is None and s.location is not None]
        read = iter(await self.store.read(wanted) if wanted else ())
        return [next(read) if body is None else body for body in known]

    async def find_heads(self, samples: Sequence[Sample]) -> None:
        """Load ``head`` for samples where it is unknown."""
        unknown = [sample for sample in samples if sample.head is None]
        places = [sample.location for sample in unknown if sample.location is not None]
        heads = iter(await self.store.read_slices([Slice(at, 0, min(HEAD_BYTES, at.length)) for at in places]))
        for sample in unknown:
            sample.head = head_of(sample.body or b"" if sample.location is None else next(heads))

    async def json_bodies(self, samples: Sequence[Sample]) -> list[bytes]:
        """Return the bodies of ``samples`` as JSON, the form in which hooks and people see binary samples."""
        return [as_json(body) for body in await self.bodies(samples)]

    @property
    def is_exhausted(self) -> bool:
        """Whether the run has ended and nothing is left to deliver."""
        return self.run.has_ended and not self.groups.is_any(GroupState.OPEN, GroupState.READY, GroupState.LEASED)
