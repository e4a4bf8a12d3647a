"""Finds, for a run that replays another, what is recorded of each group, or of another epoch that replaces it."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from forebay.buffer.recorded_group import stretches_of_bodies
from forebay.core.binary_sample import join_samples
from forebay.core.errors import InputRefused, NotFound, StorageFailed
from forebay.core.ids import InstanceId, group_id
from forebay.core.outcome import RolloutOutcome
from forebay.core.records.rows import SampleRow, StoredSample
from forebay.core.run import Run
from forebay.core.tasks import TaskSet
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.group_frames import GroupHead
from forebay.replay.options import ReplayOptions
from forebay.replay.source import Source
from forebay.replay.substitutes import substitute
from forebay.server.runs.replay_sources import ReplaySources, groups_of

logger = logging.getLogger(__name__)

Keys = Sequence[tuple[InstanceId, int]]
"""Keys of groups: instance and epoch."""


@dataclass(frozen=True, slots=True)
class UsableGroup:
    """A recorded group and the samples of it that are reused."""

    source: Source
    group_id: str
    epoch: int
    samples: Sequence[StoredSample]
    is_whole: bool
    """Whether all samples that would be reused have a body that is neither damaged nor gone."""
    damaged: set[str]
    """Uids of samples whose bodies were found damaged; more may be added later."""

    @property
    def head(self) -> GroupHead:
        """The head of the reply to a run process."""
        run_id, rows = self.source.run.run_id, [sample.row for sample in self.samples]
        return GroupHead(run_id=run_id, group_id=self.group_id, epoch=self.epoch, samples=rows)

    async def bodies(self) -> AsyncIterator[bytes]:
        """The samples' bodies as frames; a damaged body becomes an empty frame, and is generated again."""
        for some in stretches_of_bodies(self.samples):
            try:
                yield join_samples(await self.source.bodies(some))
            except StorageFailed:
                for each in some:
                    yield join_samples([await self._body(each)])

    async def _body(self, sample: StoredSample) -> bytes:
        try:
            return (await self.source.bodies([sample]))[0]
        except StorageFailed as error:
            if sample.row.uid not in self.damaged:
                self.damaged.add(sample.row.uid)
                logger.error("sample %s is not replayed: %s", sample.row.uid, error)
            return b""


@dataclass(frozen=True, slots=True)
class _Replayed:
    """The source that one run replays."""

    options: ReplayOptions
    found: str
    source: Source
    opened: AsyncExitStack
    keys: Keys | None
    """The groups to replay, in order; None for all groups of the run's input."""
    epochs: Mapping[InstanceId, Mapping[int, str]]
    """Groups of each instance by epoch, if one epoch may replace another."""
    checked: set[str] = field(default_factory=set)
    """Groups whose bodies were read to check that they are readable."""
    damaged_samples: set[str] = field(default_factory=set)
    damaged_groups: set[str] = field(default_factory=set)

    async def usable(self, group: str, epoch: int, *, checks: bool) -> UsableGroup:
        """The reusable part of a group. ``checks`` reads its bodies now; otherwise damage may show up later."""
        found = await self._usable(group, epoch)
        if not checks or group in self.checked:
            return found
        num_damaged = len(self.damaged_samples)
        async for _ in found.bodies():
            pass
        self.checked.add(group)
        return found if num_damaged == len(self.damaged_samples) else await self._usable(group, epoch)

    async def _usable(self, group: str, epoch: int) -> UsableGroup:
        members = [each for each in await self._samples(group) if each.row.outcome == "member"]
        gone = {(each.row.slot, each.row.rollout_id) for each in members if not self._has_body(each)}
        mains = [
            (each.row.slot, each.row.rollout_id)
            for each in members
            if not each.row.fork and _is_used(self.options, each.row)
        ]
        there = set(mains) - gone
        # The forks of a rollout are in its slot, and are reused with it.
        samples = [each for each in members if (each.row.slot, each.row.rollout_id) in there]
        return UsableGroup(self.source, group, epoch, samples, len(there) == len(mains), self.damaged_samples)

    async def _samples(self, group: str) -> Sequence[StoredSample]:
        if group in self.damaged_groups:
            return ()
        try:
            return (await self.source.samples([group])).get(group, ())
        except NotRecorded:
            return ()
        except RecordingDamaged as error:  # other groups are intact
            self.damaged_groups.add(group)
            logger.error("group %s is not replayed: %s", group, error)
            return ()

    def _has_body(self, sample: StoredSample) -> bool:
        return sample.row.uid not in self.damaged_samples and self.source.has_body(sample)


class RecordedGroups:
    """Finds recorded groups for runs with a process. Leaving the context closes open recordings."""

    def __init__(self, sources: ReplaySources) -> None:
        self._sources = sources
        self._replayed: dict[str, _Replayed] = {}
        self._lock = asyncio.Lock()
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()
        for replayed in self._replayed.values():
            await replayed.opened.aclose()

    async def keys(self, run: Run) -> Keys | None:
        """The groups that a run replays; None for all of its input. Raises ``InputRefused`` without the source."""
        return (await self._of(run)).keys

    async def find(self, run: Run, instance_id: InstanceId, epoch: int) -> UsableGroup:
        """The recording of a group of ``run``, or of another epoch in its place: a complete one, if there is one.

        Raises ``NotRecorded``, ``StorageFailed``, ``InputRefused`` without the source.
        """
        replayed = await self._of(run)
        left = {**replayed.epochs.get(instance_id, {}), epoch: group_id(instance_id, epoch)}
        in_part: UsableGroup | None = None
        while (chosen := substitute(epoch, left)) is not None:
            group = left.pop(chosen)
            # This reads each body again, so only if another epoch could be used instead.
            found = await replayed.usable(group, chosen, checks=bool(left or in_part))
            if found.samples and (chosen == epoch or found.is_whole):
                return found
            in_part = in_part or (found if found.samples else None)
        if in_part is None:
            hint = "the modes cache and repeat generate what is missing"
            raise NotRecorded(f"nothing is recorded for instance {instance_id!r} in epoch {epoch}", hint=hint)
        return in_part

    async def _of(self, run: Run) -> _Replayed:
        async with self._lock:
            replayed = self._replayed.get(run.run_id)
            options = ReplayOptions.parse(run.payload.get("replay"))
            if options is None or run.replay is None:
                raise NotRecorded(f"run {run.run_id} replays nothing")
            found = run.replay["source"]
            if replayed is None or (replayed.options, replayed.found) != (options, found):
                await self._forget(run.run_id)
                try:
                    replayed = self._replayed[run.run_id] = await self._open(options, found)
                except (NotFound, RecordingDamaged) as error:
                    # A run process would take the original errors as the end of its run, or as a request to retry.
                    raise InputRefused(
                        f"the recording that the run replays cannot be read any more: {error.message}",
                        hint=error.hint,
                        field="replay.source",
                    ) from error
            return replayed

    def note_ended(self, run_id: str) -> None:
        """Close the recording of a run that has no process any more."""
        if run_id in self._replayed:
            self._tasks.start(self._let_go(run_id))

    async def _let_go(self, run_id: str) -> None:
        async with self._lock:
            await self._forget(run_id)

    async def _forget(self, run_id: str) -> None:
        """Close the recording that this run has replayed so far."""
        replayed = self._replayed.pop(run_id, None)
        if replayed is not None:
            await replayed.opened.aclose()

    async def _open(self, options: ReplayOptions, found: str) -> _Replayed:
        async with AsyncExitStack() as stack:
            source = await stack.enter_async_context(self._sources.opened(options, found))
            keys, epochs = None, defaultdict[InstanceId, dict[int, str]](dict)
            if options.mode == "only" or options.steps is not None:
                keys = [(group.instance_id, group.epoch) for group in await groups_of(source, options)]
            if options.mode == "repeat":
                for group in await source.groups():
                    epochs[group.instance_id][group.epoch] = group.group_id
            return _Replayed(options, found, source, stack.pop_all(), keys, epochs)


def _is_used(options: ReplayOptions, main: SampleRow) -> bool:
    if main.reward is not None or options.mode == "only":
        return True
    # The rollout is usable: only its judge had failed, and is asked again.
    return options.rewards == "again" and main.rollout_outcome == RolloutOutcome.JUDGE_FAILURE
