"""One run in the buffer: its groups in memory, and every change of them on its way to the store."""

import asyncio
import logging
from asyncio import Future
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from forebay.buffer.groups.meta_info import MetaWindow
from forebay.buffer.groups.table import Groups, Placement, Sample, SampleGroup
from forebay.buffer.leases.batches import Batches
from forebay.buffer.store.abc import Store
from forebay.buffer.store.rows import GroupRow, Location, Outcome, Row, RunRow, SampleRow, TickRow
from forebay.buffer.write_receipt import Receipt
from forebay.core.binary_sample import HEAD_BYTES, as_json, head_of
from forebay.core.clock import ActiveClock, Clock
from forebay.core.errors import BufferFull, RunEnded, StorageFailed
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId, group_id
from forebay.core.outcome import RolloutOutcome
from forebay.core.run import Run, RunState
from forebay.core.sample import Incoming
from forebay.core.waiting import Patience, Signal
from forebay.hooks.run_hooks import HookRunner

logger = logging.getLogger(__name__)

AHEAD = "an earlier write failed"


class RunBuffer:
    """A run's groups, clock and hooks. What is decided in memory at once is answered only when the disk has it."""

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
        self.wall, self.monotonic = clock.wall, clock.monotonic
        self.hooks = hooks
        self.active = ActiveClock(clock, active_s)
        self.groups = Groups(run.run_id, run.settings, first_epochs=Counter(run.base_skip))
        self.batches = Batches(run.run_id)
        self.window = self.new_window()
        self.uids: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Samples accepted since this server started, by what became of them."""
        self.outcomes: Counter[RolloutOutcome] = Counter()
        """Rollouts of which samples were accepted since then, by how they ended; forks are of one rollout."""
        self.lock = asyncio.Lock()
        """Held while hooks are asked and groups are chosen, so that readers take turns."""
        self.news = Signal()
        self.last_progress_s = active_s
        self.last_sample_s = active_s
        self.is_stalled = False
        self.is_alarmed = False
        """Whether the alarm that there is has been logged."""
        self.has_failed = False
        """Set when a change could not be stored: memory is ahead of the disk, and another object takes over."""
        self._pending: dict[str, Receipt] = {}
        """Receipts of samples that the disk does not have yet, by uid."""
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
        refused.exception()  # whoever does not wait for it need not learn of it
        return refused

    def _check(self, stored: "Future[Location | None]") -> None:
        if not stored.cancelled() and stored.exception() is not None:
            self._fail()

    def _fail(self) -> None:
        if not self.has_failed:
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
        """Deadlines count unless the run is validated, waits for its engine or trainer, is paused, or has ended."""
        run = self.run
        is_waiting = run.is_waiting_for_engine or run.is_held or run.is_paused
        is_stopped = run.state is RunState.VALIDATING or (run.state is RunState.RUNNING and is_waiting)
        self.active.run(not is_stopped and not run.has_ended)

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

    def write(self, sample: Incoming) -> Receipt:
        """Accept a sample. Raises ``BufferFull`` when it needs a new group and there is no room, ``StorageFailed``."""
        self.check_storage()
        if sample.uid in self.uids:
            return self._duplicate(sample)
        now_s = self.active.now_s()
        if self.run.has_ended:
            return self._write_late(sample, now_s)
        self._check_room(sample.instance_id, sample.epoch, now_s)
        placement = self.groups.place(sample, now_s)
        rows: list[Row] = [self._sample_row(sample, placement, now_s)]
        if placement.is_group_changed:
            rows.append(placement.group.row)
        kept: Sample | None = None
        if placement.outcome == "member":
            kept = _kept(sample, placement.slot)
            self.groups.add(placement, kept, now_s)
            self.window.add(placement.group, kept)
        self.last_sample_s = self.last_progress_s = now_s
        self.is_stalled = False
        receipt = self._store(sample, rows, placement.outcome, kept)
        self.news.notify()
        return receipt

    def _store(self, sample: Incoming, rows: Sequence[Row], outcome: Outcome, kept: Sample | None) -> Receipt:
        uid, is_failed, counts = sample.uid, sample.reward is None, self.counts
        self.uids.add(uid)
        counts["bytes"] += len(sample.body)
        self.outcomes[sample.outcome] += not sample.fork
        counts["failed" if is_failed and outcome == "member" else outcome] += 1
        self._pending[uid] = receipt = Receipt(uid, outcome, is_failed, kept)
        self.store.submit(rows, sample.body, partial(self._settle, receipt))
        return receipt

    def _settle(self, receipt: Receipt, location: Location | None, error: StorageFailed | None) -> None:
        del self._pending[receipt.uid]
        if error is not None:
            self._fail()
        receipt.settle(location, error)

    def _duplicate(self, sample: Incoming) -> Receipt:
        self.counts["duplicate"] += 1
        repeated = self.groups.note_repeat(sample.instance_id, sample.uid)
        if repeated is not None:
            self.record(repeated.row)
        return Receipt.of_repeat(sample.uid, self._pending.get(sample.uid))

    def _write_late(self, sample: Incoming, now_s: float) -> Receipt:
        key = group_id(sample.instance_id, sample.epoch or 0)
        row = self._row(sample, key, sample.epoch or 0, -1 if sample.slot is None else sample.slot, "late", now_s)
        return self._store(sample, [row], "late", None)

    def _sample_row(self, sample: Incoming, placement: Placement, now_s: float) -> SampleRow:
        row = placement.group.row
        return self._row(sample, row.group_id, row.epoch, placement.slot, placement.outcome, now_s, row.number)

    def _row(
        self, sample: Incoming, key: str, epoch: int, slot: int, outcome: Outcome, now_s: float, group_number: int = 0
    ) -> SampleRow:
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
            rollout_id=sample.rollout_id,
            oldest_version=sample.oldest_version,
            group_number=group_number,
            fork=sample.fork,
            rollout_outcome=sample.outcome.value,
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

    async def write_when_room(self, sample: Incoming, wait_s: float) -> Receipt:
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

    def move(self, group: SampleGroup, state: GroupState, reason: str = "", detail: str = "") -> None:
        """Bring a group into another state, write it down, and tell whoever waits."""
        was_open = group.state is GroupState.OPEN
        self.groups.move(group, state, self.active.now_s(), reason, detail)
        self.record(group.row)
        if was_open:
            self.notify_closed(group)
        self.news.notify()

    def notify_closed(self, group: SampleGroup) -> None:
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
        known = [sample.body for sample in samples]
        wanted = [s.location for s, body in zip(samples, known, strict=True) if body is None and s.location is not None]
        read = iter(await self.store.read(wanted) if wanted else ())
        return [next(read) if body is None else body for body in known]

    async def find_heads(self, samples: Sequence[Sample]) -> None:
        """Fill in ``head`` where it is not known; no more than the beginnings of bodies is read."""
        unknown = [sample for sample in samples if sample.head is None]
        places = [sample.location for sample in unknown if sample.location is not None]
        heads = iter(await self.store.read([Location(p.segment, p.offset, min(HEAD_BYTES, p.length)) for p in places]))
        for sample in unknown:
            sample.head = head_of(sample.body or b"" if sample.location is None else next(heads))

    async def json_bodies(self, samples: Sequence[Sample]) -> list[bytes]:
        """The same as JSON, which is what hooks and people see of binary samples."""
        return [as_json(body) for body in await self.bodies(samples)]

    @property
    def alarm(self) -> Mapping[str, int] | None:
        """By reason, how many groups in a row ended undelivered, if they are enough for an alarm."""
        return self.groups.fruitless.reasons(self.run.settings.alarm_after_groups)

    @property
    def is_exhausted(self) -> bool:
        """Whether the run has ended and nothing of it will ever be delivered."""
        return self.run.has_ended and not self.groups.is_any(GroupState.OPEN, GroupState.READY, GroupState.LEASED)


def _kept(sample: Incoming, slot: int) -> Sample:
    body = sample.body
    return Sample(
        sample.uid,
        slot,
        sample.reward,
        len(body),
        sample.reward_span,
        None,
        body,
        sample.rollout_id,
        sample.oldest_version,
        head_of(body),
        sample.fork,
        sample.outcome.value,
    )
