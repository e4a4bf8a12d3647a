"""Simulates recorded groups: an in-memory buffer with hooks and settings to be tried out.

A group's samples are written at their recorded times, on a manual clock. The group is read at once, as by a
waiting trainer; then its deadlines pass. All rules are the buffer's. Groups do not affect each
other, since each sample names its group. So a new buffer regularly replaces the old one, and
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
"""Samples in one buffer before a new buffer replaces it."""
BUFFERS_PER_COLLECTION = 8
"""Replaced buffers before a garbage collection, because a buffer refers to itself."""
NEVER = 1 << 62


class RehearsalHooks(HookRunner):
    """Hooks that outlive the buffers which call them. Their events are discarded."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None  # the hooks outlive a buffer; see `close`

    async def close(self) -> None:
        """End the hooks' process."""
        await super().__aexit__()

    def in_host(self, stage: Stage) -> bool:
        """Whether the hook is the user's own; never for ``meta_info``, because no trainer gets the batches."""
        return stage != "meta_info" and super().in_host(stage)

    def notify(self, event: Event, **payload: Any) -> None:
        """Discard the event."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A recorded sample to be written again."""

    sample: Incoming
    at_s: float
    """Seconds after its group opened."""
    is_member: bool
    """Whether it was a member of its group; otherwise it was late or surplus."""


class Rehearsal:
    """Simulates a recorded run with given settings and hooks. Enter it with ``async with``.

    ``is_slime``: its trainer uses slime's routes, which discard a group with fewer rows than ``group_size``.
    """

    def __init__(
        self, recorded: RecordedRun, settings: RunSettings, hooks: RehearsalHooks, *, is_slime: bool = False
    ) -> None:
        # Disables alarms about many groups: they would be logged for groups of the distant past.
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
        """Return the outcome of a group with these arrivals, members first. Raises ``StorageFailed``."""
        entry = await self._roomy_entry()
        opened_s = self._clock.monotonic()
        await announce(entry.buffer, [(group.instance_id, group.epoch)])
        trial = _Trial(entry, entry.buffer.groups.by_id[group.group_id], self._request)
        members = [arrival for arrival in arrivals if arrival.is_member]
        for arrival in members:
            await self._pass_until(opened_s + arrival.at_s, trial)
            await trial.write(arrival.sample)
        # A salvaged group was not requested, or not delivered, while it was open.
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
        # Not when the buffer is dropped: its parts refer to each other, so only the garbage collector would free them.
        self._store.drop_bodies()
        # The next read must not find a group that stayed open.
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
                gc.collect()  # it would run by itself only when such objects are a quarter of all
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
    """A simulated group in its buffer."""

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
        """Apply the group's deadlines that are due now."""
        buffer, deadlines = self._entry.buffer, self._entry.deadlines
        if self.is_open and deadlines.due_s(self._group) <= buffer.active.now_s():
            buffer.is_stalled = True  # suppresses the warning: hours pass at once without progress
            await deadlines.advance()

    async def read(self) -> None:
        """Read as a waiting trainer: call the hooks, and acknowledge what is delivered."""
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
