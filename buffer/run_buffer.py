"""One run in the buffer: its groups in memory, and every change of them on its way to the store."""

import asyncio
import logging
from asyncio import Future
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec

from forebay.buffer.groups import Group, Groups, Placement, Sample
from forebay.buffer.meta import MetaWindow
from forebay.buffer.store.abc import Store
from forebay.buffer.store.rows import GroupRow, Location, Outcome, Row, RunRow, SampleRow, TickRow
from forebay.core.active_clock import ActiveClock
from forebay.core.clock import Clock
from forebay.core.errors import BufferFull, RunEnded, StorageFailed
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId, group_id
from forebay.core.run import Run, RunState
from forebay.core.sample import Incoming
from forebay.core.signal import Patience, Signal
from forebay.hooks.runner import HookRunner

logger = logging.getLogger(__name__)

AHEAD = "an earlier write failed"


class WriteResult(msgspec.Struct, frozen=True):
    """What became of a sample; true once ``stored`` is done."""

    uid: str
    is_duplicate: bool
    outcome: Outcome
    is_failed: bool
    stored: "Future[Location | None]"


class _Pending(NamedTuple):
    """A sample that the disk does not have yet; ``kept`` is what memory has of it."""

    stored: "Future[Location | None]"
    kept: Sample | None


class RunBuffer:
    """A run's groups, clock and hooks. Decisions are made in memory at once, and told only when the disk has them."""

    def __init__(
        self,
        run: Run,
        store: Store,
        clock: Clock,
        hooks: HookRunner,
        *,
        active_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self.run = run
        self.store = store
        self.wall = clock.wall
        self.hooks = hooks
        self.active = ActiveClock(clock, active_s)
        self.groups = Groups(run.run_id, run.settings, first_epochs=Counter(run.base_skip))
        self.window = self.new_window()
        self.uids: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Samples accepted since this server started, by what became of them."""
        self.lock = asyncio.Lock()
        """Held while hooks are asked and groups are chosen, so that readers take turns."""
        self.news = Signal()
        self.last_progress_s = active_s
        self.last_sample_s = active_s
        self.is_stalled = False
        self.has_failed = False
        """Set when a change could not be stored: memory is ahead of the disk, and another object takes over."""
        self._pending: dict[str, _Pending] = {}
        self._on_failure = on_failure
        self._ticked_s = active_s
        self.update_clock()

    # --- writing things down

    def record(self, *rows: Row, body: bytes | None = None) -> "Future[Location | None]":
        """Hand a change to the store, as it is now; refused while memory is ahead of the disk."""
        if self.has_failed:
            return self._refused()
        stored = self.store.append(rows, body)
        stored.add_done_callback(self._check)
        return stored

    def _refused(self) -> "Future[Location | None]":
        refused: Future[Location | None] = asyncio.get_running_loop().create_future()
        refused.set_exception(StorageFailed(AHEAD))
        refused.exception()  # whoever does not wait for it need not be told
        return refused

    def _check(self, stored: "Future[Location | None]") -> None:
        if not stored.cancelled() and stored.exception() is not None and not self.has_failed:
            self.has_failed = True
            self._on_failure()

    def check_storage(self) -> None:
        """Raise ``StorageFailed`` while memory is ahead of the disk."""
        if self.has_failed:
            raise StorageFailed(AHEAD)

    def run_row(self) -> RunRow:
        """The run as the store keeps it."""
        run = self.run
        return RunRow(
            run_id=run.run_id,
            name=run.name,
            task_type=run.task_type,
            state=run.state.value,
            created_at_s=run.created_at_s,
            active_s=self.active.now_s(),
            document=run.document(),
        )

    async def save_run(self) -> None:
        """Store the run as it is now. Raises ``StorageFailed``."""
        self.update_clock()
        await self.record(self.run_row())
        self.news.notify()

    def update_clock(self) -> None:
        """Deadlines count unless the run is still being validated, waits for its engine, or has ended."""
        run = self.run
        is_held = run.state is RunState.VALIDATING or (run.state is RunState.RUNNING and run.is_waiting_for_engine)
        self.active.run(not is_held and not run.has_ended)

    def record_tick(self, every_s: float) -> None:
        """Note how far the deadlines have counted, if it is ``every_s`` further than last noted."""
        now_s = self.active.now_s()
        if now_s - self._ticked_s >= every_s and self.groups.is_any(GroupState.OPEN):
            self._ticked_s = now_s
            self.record(TickRow(run_id=self.run.run_id, active_s=now_s))

    def new_window(self) -> MetaWindow:
        """An empty window that remembers samples if a user's meta hook will want them."""
        wants_samples = self.hooks.in_host("meta_info")
        return MetaWindow(keep_samples=self.run.settings.meta_max_samples if wants_samples else 0)

    # --- samples

    def write(self, sample: Incoming) -> WriteResult:
        """Accept a sample. Raises ``BufferFull`` when it needs a new group and there is no room, ``StorageFailed``."""
        self.check_storage()
        if sample.uid in self.uids:
            return self._duplicate(sample)
        now_s = self.active.now_s()
        if self.run.has_ended:
            return self._write_late(sample, now_s)
        self._check_room(sample.instance_id, sample.epoch, now_s)
        placement = self.groups.place(sample.instance_id, sample.epoch, sample.slot, now_s)
        kept = Sample(
            sample.uid, placement.slot, sample.reward, len(sample.body), sample.reward_span, None, sample.body
        )
        rows: list[Row] = [self._sample_row(sample, placement, now_s)]
        if placement.is_group_changed:
            rows.append(placement.group.row)
        if placement.outcome == "member":
            self.groups.add(placement, kept, now_s)
            self.window.add(placement.group, kept)
        self.last_sample_s = self.last_progress_s = now_s
        self.is_stalled = False
        result = self._store(sample, rows, placement.outcome, kept)
        self.news.notify()
        return result

    def _store(self, sample: Incoming, rows: Sequence[Row], outcome: Outcome, kept: Sample | None) -> WriteResult:
        uid = sample.uid
        self.uids.add(uid)
        stored = self.store.append(rows, sample.body)
        if not self._pending:
            stored.add_done_callback(self._settle)
        self._pending[uid] = _Pending(stored, kept)
        self.counts["bytes"] += len(sample.body)
        self.counts[outcome if sample.reward is not None or outcome != "member" else "failed"] += 1
        return WriteResult(uid, False, outcome, sample.reward is None, stored)

    def _settle(self, _: "Future[Location | None]") -> None:
        """Take note of what is stored. The disk confirms in order, so that one call serves a whole commit."""
        settled = list(takewhile(lambda item: item[1].stored.done(), self._pending.items()))
        for uid, (stored, kept) in settled:
            del self._pending[uid]
            self._check(stored)
            if kept is not None and not stored.cancelled() and stored.exception() is None:
                kept.location, kept.body = stored.result(), None
        for waiting in self._pending.values():
            waiting.stored.add_done_callback(self._settle)
            break

    def _duplicate(self, sample: Incoming) -> WriteResult:
        self.counts["duplicate"] += 1
        repeated = self.groups.note_repeat(sample.instance_id, sample.uid)
        if repeated is not None:
            self.record(repeated.row)
        pending = self._pending.get(sample.uid)
        if pending is not None:
            return WriteResult(sample.uid, True, "member", False, pending.stored)
        stored: Future[Location | None] = asyncio.get_running_loop().create_future()
        stored.set_result(None)
        return WriteResult(sample.uid, True, "member", False, stored)

    def _write_late(self, sample: Incoming, now_s: float) -> WriteResult:
        key = group_id(sample.instance_id, sample.epoch or 0)
        row = self._row(sample, key, sample.epoch or 0, -1 if sample.slot is None else sample.slot, "late", now_s)
        return self._store(sample, [row], "late", None)

    def _sample_row(self, sample: Incoming, placement: Placement, now_s: float) -> SampleRow:
        group = placement.group
        return self._row(sample, group.group_id, group.row.epoch, placement.slot, placement.outcome, now_s)

    def _row(self, sample: Incoming, key: str, epoch: int, slot: int, outcome: Outcome, now_s: float) -> SampleRow:
        start, end = sample.reward_span or (0, 0)
        return SampleRow(
            run_id=self.run.run_id,
            uid=sample.uid,
            instance_id=sample.instance_id,
            group_id=key,
            epoch=epoch,
            slot=slot,
            outcome=outcome,
            reward=sample.reward,
            at_s=now_s,
            received_at_s=self.wall(),
            error=sample.error,
            reward_start=start,
            reward_end=end,
        )

    def _check_room(self, instance_id: InstanceId, epoch: int | None, now_s: float) -> None:
        groups, settings = self.groups, self.run.settings
        if groups.num_live_samples >= settings.max_buffer_size:
            what = f"{groups.num_live_samples} samples, max_buffer_size is {settings.max_buffer_size}"
        elif groups.num_live_bytes >= settings.max_buffer_bytes:
            what = f"{groups.num_live_bytes} bytes, max_buffer_bytes is {settings.max_buffer_bytes}"
        else:
            return
        if groups.would_open(instance_id, epoch, now_s):
            raise BufferFull(what)

    async def write_when_room(self, sample: Incoming, wait_s: float) -> WriteResult:
        """As ``write``, but waits up to ``wait_s`` seconds for room. Raises ``BufferFull`` after them."""
        patience: Patience | None = None
        while True:
            try:
                return self.write(sample)
            except BufferFull:
                patience = patience or Patience(wait_s)
                if not await patience.wait(self.news):
                    raise

    async def announce(self, opened: Sequence[tuple[InstanceId, int]]) -> None:
        """Open groups before their first sample, so that their deadlines count. Raises ``BufferFull``, ``RunEnded``."""
        self.check_storage()
        if self.run.has_ended:
            raise RunEnded(self.run.run_id, self.run.reason or self.run.state.value)
        now_s = self.active.now_s()
        rows: list[GroupRow] = []
        for instance_id, epoch in opened:
            if group_id(instance_id, epoch) not in self.groups.by_id:
                if not rows:  # an announced group takes no room: what holds for the first holds for all
                    self._check_room(instance_id, epoch, now_s)
                rows.append(self.groups.open(instance_id, epoch, now_s, is_announced=True).row)
        if rows:
            self.last_progress_s, self.is_stalled = now_s, False
            await self.record(*rows)

    # --- groups

    def move(self, group: Group, state: GroupState, reason: str = "", detail: str = "") -> None:
        """Bring a group into another state, write it down, and tell whoever waits."""
        was_open = group.state is GroupState.OPEN
        self.groups.move(group, state, self.active.now_s(), reason, detail)
        self.record(group.row)
        if was_open:
            self.told_closed(group)
        self.news.notify()

    def told_closed(self, group: Group) -> None:
        """Let plugins know that a group takes no more samples."""
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
        """The stored bodies of ``samples``, in that order."""
        held = [sample.body for sample in samples]
        wanted = [s.location for s, body in zip(samples, held, strict=True) if body is None and s.location is not None]
        read = iter(await self.store.read(wanted) if wanted else ())
        return [next(read) if body is None else body for body in held]

    @property
    def is_exhausted(self) -> bool:
        """Whether the run has ended and nothing of it will ever be delivered."""
        return self.run.has_ended and not self.groups.is_any(GroupState.OPEN, GroupState.READY, GroupState.LEASED)
