"""The decisions of hooks: which groups are ready, and which rows are delivered."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from forebay.buffer.groups.meta_info import MetaWindow
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.buffer.reads.reply_rows import Finish, Planned
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.run_warnings import DROPPED_ARRAYS, warn
from forebay.core.errors import BodyUnreadable, HookFailed, StorageFailed
from forebay.core.group import LIVE, DiscardReason, GroupState, range_text
from forebay.core.ids import InstanceId
from forebay.core.run import RunSettings
from forebay.hooks.advantages import is_valid_reward
from forebay.hooks.answer_checks import logged
from forebay.hooks.run_hooks import HookRunner
from forebay.hooks.types import HookInput, Row, Sizes, Stage

logger = logging.getLogger(__name__)

GROUPS_PER_TURN = 128
"""Groups judged before other work of the server gets a turn."""


@dataclass(slots=True)
class JudgedGroup:
    """A group after its hooks, ready for delivery: its rows, and the samples that they refer to."""

    rows: list[Row]
    samples: list[Sample]
    made_by: HookRunner

    def planned(self, finish: Finish | None = None) -> list[Planned]:
        """Each row with its source; ``finish`` is applied to the encoded rows."""
        samples = self.samples
        return [
            Planned(row, samples[row.source] if row.body is None and row.source is not None else None, finish)
            for row in self.rows
        ]

    def for_slime(self, group_size: int) -> "JudgedGroup":
        """The rows for slime's routes: ``group_size``, or under contract A a multiple of it; forks are cut first."""
        num_mains = len(self.rows) - sum(map(self._is_fork, self.rows))
        num_rows = group_size if self.made_by.contract == "B" else max(1, num_mains // group_size) * group_size
        rows = self.rows if len(self.rows) <= num_rows else sorted(self.rows, key=self._is_fork)
        return JudgedGroup(rows[:num_rows], self.samples, self.made_by)

    @property
    def are_foreign(self) -> list[bool]:
        """For each row, whether Forebay's field names mean something else in it (``core.sample.WRITER_HEADER``)."""
        # A row without a source, made by a user's hook, is treated like its group.
        of_group = any(sample.row.is_foreign for sample in self.samples)
        return [of_group if row.source is None else self.samples[row.source].row.is_foreign for row in self.rows]

    def _is_fork(self, row: Row) -> bool:
        return row.source is not None and self.samples[row.source].row.fork > 0

    @property
    def num_bytes(self) -> int:
        """Approximate size of the rows in a reply."""
        return sum(planned.num_bytes for planned in self.planned())


class GroupJudge:
    """Calls the hooks for one run's groups. Its methods require the run's lock."""

    def __init__(self, buffer: RunBuffer) -> None:
        self._buffer = buffer
        self._groups = buffer.groups
        self._sized_by: RunSettings | None = None
        self._cached_sizes = Sizes(0, 0, 0)

    @property
    def _hooks(self) -> HookRunner:
        return self._buffer.hooks

    @property
    def _settings(self) -> RunSettings:
        return self._buffer.run.settings

    def _timed(self, stage: Stage, group_id: str = "") -> AbstractContextManager[None]:
        """Record a span of the user's own hooks in the run's trace."""
        return self._noted(stage, group_id) if self._hooks.in_host(stage) else nullcontext()

    @contextmanager
    def _noted(self, stage: Stage, group_id: str) -> Iterator[None]:
        began_s, error = time.monotonic(), ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self._buffer.changes.hooks_asked(stage, began_s, group_id, error)

    # --- which groups are ready

    async def evaluate(self) -> None:
        """Call ``is_valid_group`` for every open group that changed since its last call."""
        changed = self._groups.changed
        num_asked = 0
        # Not a for loop: samples arrive and groups close while a hook runs.
        while changed:
            await self.judge_changed(next(iter(changed.values())))
            num_asked += 1
            if num_asked % GROUPS_PER_TURN == 0:
                await asyncio.sleep(0)

    async def judge_changed(self, group: SampleGroup) -> None:
        """Call ``is_valid_group`` for one changed group."""
        changed = self._groups.changed
        # Before the call, so that a sample that arrives meanwhile adds the group again.
        del changed[group.group_id]
        try:
            await self._judge(group)
        except BaseException:  # includes a cancelled reader: the group must be judged later
            if group.state is GroupState.OPEN:
                changed[group.group_id] = group
            raise

    async def _judge(self, group: SampleGroup) -> None:
        if group.state is not GroupState.OPEN:
            return
        is_full = self._groups.is_full(group)
        if not group.num_completed:
            if is_full:
                detail = f"all {group.row.num_samples} samples failed: {group.failures_text()}"
                self._buffer.move(group, GroupState.DISCARDED, DiscardReason.FAILED, detail)
            return
        # Writes need no lock, so the group may have changed by the time of the answer.
        num_samples = len(group.samples)
        try:
            asked = self._input(group.instance_id, group.completed_mains)
            with self._timed("judge", group.group_id):
                verdict = await self._hooks.judge(asked, self._reachable(group))
        except HookFailed as error:
            self._discard_failed(group, error)
            return
        except BodyUnreadable as error:
            self.discard_unreadable(group, error)
            return
        if group.state is not GroupState.OPEN or len(group.samples) != num_samples:
            return  # it changed meanwhile, and is in `changed` again
        self._groups.short_valid.pop(group.group_id, None)
        if verdict.is_valid and is_full:
            await self.make_ready(group)
        elif verdict.is_valid:
            self._groups.short_valid[group.group_id] = group
        elif verdict.is_finished or is_full:
            # A full group that is neither valid nor finished will never become valid.
            self._buffer.move(group, GroupState.DISCARDED, DiscardReason.INVALID)

    async def make_ready(self, group: SampleGroup) -> None:
        """Make an open group ready, or discard it if the built-in filter will drop it because of its rewards.

        This is decided at once, so that a run without readers does not seem to have useful groups only.
        """
        self._buffer.move(group, GroupState.READY)
        hooks = self._hooks
        if hooks.in_host("process"):
            return
        rewards = [sample.row.reward for sample in group.samples if sample.row.reward is not None]
        outside = [reward for reward in rewards if not is_valid_reward(reward, hooks.reward_range)]
        if outside:
            await self.stage(group)
        if group.state is GroupState.READY:
            self._groups.losses.note_rewards(rewards, outside, hooks.reward_range)

    def _discard_failed(self, group: SampleGroup, error: HookFailed) -> None:
        if group.state in (GroupState.OPEN, GroupState.READY):
            logger.warning("group %s (%r) discarded: %s", group.group_id, group.instance_id, logged(error))
            detail = f"{error}\n{error.traceback}".strip()
            self._buffer.move(group, GroupState.DISCARDED, DiscardReason.HOOK_FAILED, detail)

    def discard_unreadable(self, group: SampleGroup, error: BodyUnreadable) -> None:
        """Discard a group with a damaged body. Raises ``error`` if the whole journal has failed."""
        self._buffer.check_storage()
        if group.state in (GroupState.OPEN, GroupState.READY):
            logger.error("group %s (%r) discarded: %s", group.group_id, group.instance_id, error)
            self._buffer.move(group, GroupState.DISCARDED, DiscardReason.UNREADABLE, str(error))

    def _reachable(self, group: SampleGroup) -> Sizes:
        """Sizes for judging validity, without failed samples."""
        sizes, num_failed = self._sizes, group.row.num_failed
        if not num_failed:
            return sizes
        reachable = max(1, sizes.group_size - num_failed)
        return Sizes(reachable, min(sizes.min_valid_group_size, reachable), sizes.min_valid_item_size)

    @property
    def _sizes(self) -> Sizes:
        settings = self._settings
        if settings is not self._sized_by:  # computing this for each group would cost as much as normalising it
            self._sized_by = settings
            self._cached_sizes = Sizes(settings.group_size, settings.min_valid_group_size, settings.min_valid_item_size)
        return self._cached_sizes

    def _input(self, instance_id: InstanceId, completed: Sequence[Sample]) -> HookInput:
        rewards = [sample.row.reward for sample in completed if sample.row.reward is not None]
        rollout_ids = [sample.row.rollout_id for sample in completed]
        forks = [sample.row.fork for sample in completed]
        return HookInput(instance_id, rewards, lambda: self._buffer.json_bodies(completed), rollout_ids, forks)

    # --- delivered rows

    async def stage(self, group: SampleGroup) -> JudgedGroup | None:
        """Rows of the group after ``filter_item``, ``normalize_group_data`` and ``pad_group_data``; None if discarded.

        An incomplete group with too few rows stays open, because more samples may arrive.
        """
        if isinstance(group.staged, JudgedGroup) and self._is_current(group, group.staged):
            return group.staged
        if len(group.samples) < group.row.num_samples + group.row.num_forks:
            num_lost = group.row.num_samples + group.row.num_forks - len(group.samples)
            self.discard_unreadable(group, BodyUnreadable(f"{num_lost} of the group's samples are lost"))
            return None
        # Copied, because samples may arrive while the hooks run.
        completed, num_samples = group.completed, len(group.samples)
        try:
            with self._timed("process", group.group_id):
                processed = await self._hooks.process(self._input(group.instance_id, completed), self._sizes)
        except HookFailed as error:
            self._discard_failed(group, error)
            return None
        except BodyUnreadable as error:
            self.discard_unreadable(group, error)
            return None
        if len(group.samples) != num_samples or group.state not in LIVE:
            return None
        if processed.is_filtered:
            # An open group may get more items.
            if group.state is GroupState.READY:
                detail = f"{processed.num_kept} of {group.num_completed} items were kept"
                if processed.is_out_of_range:
                    detail += self._note_rewards(group)
                self._buffer.move(group, GroupState.DISCARDED, DiscardReason.FILTERED, detail)
            return None
        if processed.has_dropped_arrays:
            warn(self._buffer.run, DROPPED_ARRAYS)
        group.staged = JudgedGroup(processed.rows, completed, self._hooks)
        return group.staged

    def _note_rewards(self, group: SampleGroup) -> str:
        """Store and describe the rewards of a group that is dropped because of ``reward_range``."""
        rewards = [sample.row.reward for sample in group.samples if sample.row.reward is not None]
        group.row.lowest_reward, group.row.highest_reward = low, high = min(rewards), max(rewards)
        seen, allowed = range_text((low, high)), range_text(self._hooks.reward_range)
        return f": its rewards are within {seen}, reward_range is {allowed}"

    def _is_current(self, group: SampleGroup, staged: JudgedGroup) -> bool:
        """Whether the hooks' result is still valid; a repeated request for a leased batch gets identical rows."""
        return staged.made_by is self._hooks or group.state is GroupState.LEASED

    async def meta_info(self, window: MetaWindow) -> dict[str, Any]:
        """Meta info of a successful read; the built-in one if the user's hook fails."""
        if self._hooks.in_host("meta_info"):
            try:
                with self._timed("meta_info"):
                    return await self._hooks.meta_info(await self._meta_input(window))
            except (HookFailed, StorageFailed) as error:
                what = logged(error) if isinstance(error, HookFailed) else error
                logger.warning("using the built-in meta info: %s", what)
        return window.meta_info()

    async def _meta_input(self, window: MetaWindow) -> list[HookInput]:
        by_group: dict[InstanceId, list[Sample]] = {}
        for group, sample in window.newest:
            by_group.setdefault(group.instance_id, []).append(sample)
        return [self._input(instance_id, samples) for instance_id, samples in by_group.items()]
