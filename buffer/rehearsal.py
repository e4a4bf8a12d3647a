"""What would become of recorded groups: a buffer in memory, with hooks and settings that are only tried out.

The samples of a group are written to it when they came, on a clock that is moved by hand; it is read at once, as by a
trainer that waits for it; then its deadlines pass. Every rule is the buffer's. Nothing of one group
matters to another, since each sample names its group: so after a while a new buffer takes the place of the old one, and
memory holds few groups, however many there are.
"""

import gc
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from forebay.buffer.admission import announce, write_when_room
from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.reads.selection import ReadRequest
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from forebay.core.group import GroupState
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import GroupRow
from forebay.core.run import Run, RunSettings, RunState
from forebay.core.sample import Incoming
from forebay.core.starts.run_start import RunStart
from forebay.hooks.run_hooks import HookRunner
from forebay.hooks.types import Event, Stage
from forebay.replay.outcomes import DELIVERED, DISCARDED, OPEN, SALVAGED, GroupOutcome, GroupVerdict, SampleOutcome

BUFFER_SAMPLES = 1_024
"""What one buffer takes before another takes its place."""
BUFFERS_PER_COLLECTION = 8
"""A buffer that was left refers to itself."""
NEVER = 1 << 62


class RehearsalHooks(HookRunner):
    """Hooks that outlast the buffers which ask them. Nobody is notified of what is only tried out."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None  # see `close`

    async def close(self) -> None:
        """End their process."""
        await super().__aexit__()

    def in_host(self, stage: Stage) -> bool:
        """As ever, but that nobody describes the batches: no trainer gets them."""
        return stage != "meta_info" and super().in_host(stage)

    def notify(self, event: Event, **payload: Any) -> None:
        """Tell nobody."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A recorded sample on its way into a buffer once more."""

    sample: Incoming
    at_s: float
    """Seconds after its group was opened."""
    is_member: bool
    """Whether its group had it; else it was late, or surplus."""


class Rehearsal:
    """One way to treat a recorded run: its settings, its hooks. Enter it with ``async with``.

    ``is_slime``: its trainer reads over slime's routes, where a group with fewer rows than ``group_size`` is discarded.
    """

    def __init__(
        self, recorded: RecordedRun, settings: RunSettings, hooks: RehearsalHooks, *, is_slime: bool = False
    ) -> None:
        # What is only about all groups together would be logged of groups that are long past.
        quiet = {"alarm_after_groups": NEVER, "alarm_lost_ratio": 1.0}
        self._recorded = recorded
        self._settings = settings.model_copy(update=quiet)
        self._hooks = hooks
        self._request = ReadRequest(num_groups=1, is_slime=is_slime)
        self._buffers = AsyncExitStack()
        self._clock = ManualClock()
        self._store = MemoryStore()
        self._entry: LiveRun | None = None
        self._num_samples = self._num_buffers = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._buffers.aclose()
        await self._hooks.close()

    async def judge(self, group: GroupRow, arrivals: Sequence[Arrival]) -> GroupOutcome:
        """What becomes of a group whose samples come so; members first. Raises ``StorageFailed``."""
        entry = await self._roomy_entry()
        opened_s = self._clock.monotonic()
        await announce(entry.buffer, [(group.instance_id, group.epoch)])
        trial = _Trial(entry, entry.buffer.groups.by_id[group.group_id], self._request)
        members = [arrival for arrival in arrivals if arrival.is_member]
        for arrival in members:
            await self._pass_until(opened_s + arrival.at_s, trial)
            await trial.write(arrival.sample)
        # A salvaged group is one that its trainer had not asked for, or not got, while it was open.
        if trial.is_full or not group.is_salvaged:
            await trial.read()
        for arrival in arrivals[len(members) :]:
            if not trial.is_open:
                break
            await self._pass_until(opened_s + arrival.at_s, trial)
            await trial.write(arrival.sample)
            await trial.read()
        if trial.is_open and group.state != OPEN:
            await self._pass_until(self._clock.monotonic() + self._settings.group_deadline_seconds, trial)
        await trial.read()
        # Not when the buffer goes: what it is made of refers to each other, and only the collector would find it.
        self._store.drop_bodies()
        # The next read must not find a group that was left open.
        self._num_samples = BUFFER_SAMPLES if trial.is_open else self._num_samples + len(arrivals)
        return trial.outcome()

    async def _pass_until(self, at_s: float, trial: "_Trial") -> None:
        seconds = at_s - self._clock.monotonic()
        if seconds > 0:
            self._clock.advance(seconds)
            await trial.close_if_due()

    async def _roomy_entry(self) -> LiveRun:
        if self._entry is None or self._num_samples >= BUFFER_SAMPLES:
            await self._buffers.aclose()
            self._num_buffers += 1
            if self._num_buffers % BUFFERS_PER_COLLECTION == 0:
                gc.collect()  # by itself it comes once they are a quarter of all that there is
            self._clock, self._store = ManualClock(), MemoryStore()
            buffer = Buffer(self._store, lambda _: self._hooks, self._clock, tick_s=None)
            await self._buffers.enter_async_context(buffer)
            self._entry = await buffer.add(self._run())
            self._num_samples = 0
        return self._entry

    def _run(self) -> Run:
        recorded = self._recorded
        return Run(
            run_id=recorded.run_id,
            run_key="",
            name=recorded.name,
            origin="slime" if recorded.origin == "slime" else "native",
            task_type=recorded.task_type,
            settings=self._settings,
            start=RunStart({}),
            created_at_s=recorded.created_at_s,
            state=RunState.RUNNING,
        )


class _Trial:
    """A group in its buffer."""

    def __init__(self, entry: LiveRun, group: SampleGroup, request: ReadRequest) -> None:
        self._entry, self._group, self._request = entry, group, request
        self._rewards: dict[str, float | None] = {}
        self._advantages: dict[str, float] = {}

    @property
    def is_open(self) -> bool:
        return self._group.state is GroupState.OPEN

    @property
    def is_full(self) -> bool:
        return self._entry.buffer.groups.is_full(self._group)

    async def write(self, sample: Incoming) -> None:
        receipt = await write_when_room(self._entry.buffer, sample, 0.0)
        if receipt.outcome == "member" and not receipt.is_duplicate:
            self._rewards[sample.uid] = sample.reward

    async def close_if_due(self) -> None:
        """Let its deadlines do what they do by now."""
        buffer, deadlines = self._entry.buffer, self._entry.deadlines
        if self.is_open and deadlines.due_s(self._group) <= buffer.active.now_s():
            buffer.is_stalled = True  # so that nobody is warned: nothing goes on for hours, in no time
            await deadlines.advance()

    async def read(self) -> None:
        """As a trainer does that waits for it: its hooks are asked, and what goes out is acknowledged."""
        if self._group.state not in (GroupState.OPEN, GroupState.READY):
            return
        delivery = self._entry.delivery
        batch = await delivery.prepare(self._request)
        if batch is None:
            return
        for staged in batch.staged:
            for row in staged.rows:
                if row.source is not None and row.reward is not None:
                    uid = staged.samples[row.source].row.uid
                    self._advantages[uid] = self._advantages.get(uid, 0.0) + row.reward
        await delivery.leases.ack(batch.batch_id)

    def outcome(self) -> GroupOutcome:
        row = self._group.row
        samples = [SampleOutcome(uid, reward, self._advantages.get(uid)) for uid, reward in self._rewards.items()]
        return GroupOutcome(_verdict(row.state, row.reason, is_salvaged=row.is_salvaged), row.detail, samples)


def _verdict(state: GroupState, reason: str, *, is_salvaged: bool) -> GroupVerdict:
    if state is GroupState.OPEN:
        return GroupVerdict(OPEN)
    if state is GroupState.DISCARDED:
        return GroupVerdict(DISCARDED, reason)
    return GroupVerdict(DELIVERED, SALVAGED if is_salvaged else "")
