"""Feeds the groups of a recording to rehearsals: their samples, and when each one arrived."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from forebay.buffer.recorded_group import Change
from forebay.buffer.rehearsal import Arrival, Rehearsal
from forebay.buffer.store.abc import stretches
from forebay.core.errors import StorageFailed
from forebay.core.records.rows import GroupRow, SampleRow, StoredSample
from forebay.core.run import RunSettings
from forebay.replay.outcomes import GroupOutcome
from forebay.replay.recorded_sample import incoming
from forebay.replay.source import Recorded, Source

GROUPS_AT_ONCE = 64
"""Number of groups whose samples' columns are read together."""
BYTES_AT_ONCE = 1 << 20
"""Bytes of bodies that are read together; a single group may have more."""
IN_TIME = 0.999
"""Maximum share of a time-out that had passed when a group accepted a sample."""


@dataclass(frozen=True, slots=True)
class RehearsedGroup:
    """A group of the recording, and its outcome in each rehearsal."""

    group: GroupRow
    outcomes: Sequence[GroupOutcome] = ()
    """One for each rehearsal; empty if its samples cannot be read."""
    damage: str = ""
    """Why its samples cannot be read."""


@dataclass(frozen=True)
class Treatment:
    """A rehearsal, and what rewards its samples; None keeps the recorded rewards."""

    rehearsal: Rehearsal
    judge_again: Change | None = None

    async def play(self, group: GroupRow, recorded: Sequence[Recorded], settings: RunSettings) -> GroupOutcome:
        """Return the group's outcome in this rehearsal."""
        if self.judge_again is not None:
            recorded = await self.judge_again(recorded)
        return await self.rehearsal.judge(group, arrivals(group, recorded, settings))


async def rehearse(
    source: Source, groups: Sequence[GroupRow], settings: RunSettings, treatments: Sequence[Treatment]
) -> AsyncIterator[RehearsedGroup]:
    """Yield each group, in order, with its outcome in all ``treatments``. ``settings`` are the recorded run's.

    An unreadable sample costs only its group.
    """
    for start in range(0, len(groups), GROUPS_AT_ONCE):
        some = groups[start : start + GROUPS_AT_ONCE]
        columns = await _columns(source, some)
        for few, _ in stretches(some, partial(_num_bytes, columns), BYTES_AT_ONCE):
            together = await _read_together(source, few, columns)
            for group in few:
                try:
                    recorded = together.get(group.group_id) or await _recorded(source, group, columns)
                except StorageFailed as error:
                    yield RehearsedGroup(group, damage=str(error))
                else:
                    playing = (treatment.play(group, recorded, settings) for treatment in treatments)
                    yield RehearsedGroup(group, await asyncio.gather(*playing))


async def _columns(source: Source, groups: Sequence[GroupRow]) -> Mapping[str, Sequence[StoredSample]]:
    try:
        return await source.samples([group.group_id for group in groups])
    except StorageFailed:
        return {}  # each group is then read alone, to find the damaged one


def _num_bytes(columns: Mapping[str, Sequence[StoredSample]], group: GroupRow) -> int:
    return sum(sample.location.length for sample in columns.get(group.group_id, ()))


async def _read_together(
    source: Source, groups: Sequence[GroupRow], columns: Mapping[str, Sequence[StoredSample]]
) -> dict[str, list[Recorded]]:
    """Read the samples of these groups, by id; empty if one of them cannot be read, so that each is read alone."""
    found: dict[str, list[Recorded]] = {}
    with suppress(StorageFailed):
        samples = [sample for group in groups for sample in columns.get(group.group_id, ())]
        for row, body in await source.recorded(samples):
            found.setdefault(row.group_id, []).append((row, body))
    return found


async def _recorded(source: Source, group: GroupRow, columns: Mapping[str, Sequence[StoredSample]]) -> list[Recorded]:
    """Read a group's samples in order of arrival. Raises ``StorageFailed``."""
    samples = columns.get(group.group_id)
    if samples is None:
        samples = (await source.samples([group.group_id]))[group.group_id]
    return await source.recorded(samples)


def arrivals(group: GroupRow, recorded: Sequence[Recorded], settings: RunSettings) -> list[Arrival]:
    """A group's samples with their times: members first, then late and surplus samples."""
    members = [each for each in recorded if each[0].outcome == "member"]
    others = [each for each in recorded if each[0].outcome != "member"]
    times = list(_member_times(group, [record for record, _ in members], settings))
    last = (times[-1], members[-1][0].at_s) if members else None
    times += _other_times(group, [record for record, _ in others], last, settings)
    return [
        Arrival(incoming(record, body), at_s, is_member=record.outcome == "member")
        for (record, body), at_s in zip([*members, *others], times, strict=True)
    ]


def _member_times(group: GroupRow, members: Sequence[SampleRow], settings: RunSettings) -> Iterator[float]:
    """Seconds after the group opened at which its members arrived.

    A recording does not say when no rollout of a group was in flight, and deadlines do not count such times. But the
    group was open when each member arrived, so its time-outs had not passed.
    """
    at_s, before_s = 0.0, group.opened_s
    for number, sample in enumerate(members):
        passed_s = max(0.0, sample.at_s - before_s)
        if number:
            passed_s = min(passed_s, IN_TIME * settings.group_timeout_seconds)
        at_s = min(at_s + passed_s, IN_TIME * settings.group_deadline_seconds)
        before_s = sample.at_s
        yield at_s


def _other_times(
    group: GroupRow, others: Sequence[SampleRow], last: tuple[float, float] | None, settings: RunSettings
) -> Iterator[float]:
    """Times of samples that are not members. If they arrived after the group's time-out, they do so here too.

    ``last``: when the last member arrives here, and when it arrived in the recording; None without a member.
    """
    at_s, before_s = last or (0.0, group.opened_s)
    if group.closed_s is not None and (group.is_salvaged or group.reason == "timed_out"):
        due_s = at_s + settings.group_timeout_seconds if last else settings.group_deadline_seconds
        at_s, before_s = min(due_s, settings.group_deadline_seconds), group.closed_s
    for sample in others:
        yield at_s + max(0.0, sample.at_s - before_s)
