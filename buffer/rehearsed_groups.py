"""The groups of a recording on their way through rehearsals: their samples, and when each of them came."""

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
"""Whose samples' columns are read together."""
BYTES_AT_ONCE = 1 << 20
"""Of bodies that are read together, unless a group has more."""
IN_TIME = 0.999
"""Share of a time-out that had passed, at most, when a sample came that its group took."""


@dataclass(frozen=True, slots=True)
class RehearsedGroup:
    """A group of the recording, and what each rehearsal made of it."""

    group: GroupRow
    outcomes: Sequence[GroupOutcome] = ()
    """One for each rehearsal; none where its samples cannot be read."""
    damage: str = ""
    """Why they cannot."""


@dataclass(frozen=True)
class Treatment:
    """A rehearsal, and who gives its samples their rewards: they have those that were recorded if it is nobody."""

    rehearsal: Rehearsal
    judge_again: Change | None = None

    async def play(self, group: GroupRow, recorded: Sequence[Recorded], settings: RunSettings) -> GroupOutcome:
        """What becomes of the group in it."""
        if self.judge_again is not None:
            recorded = await self.judge_again(recorded)
        return await self.rehearsal.judge(group, arrivals(group, recorded, settings))


async def rehearse(
    source: Source, groups: Sequence[GroupRow], settings: RunSettings, treatments: Sequence[Treatment]
) -> AsyncIterator[RehearsedGroup]:
    """Each of the groups, in that order, in all ``treatments``. ``settings`` are those of the recorded run.

    What cannot be read costs its group.
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
        return {}  # then each is read for itself, and the damaged one is found


def _num_bytes(columns: Mapping[str, Sequence[StoredSample]], group: GroupRow) -> int:
    return sum(sample.location.length for sample in columns.get(group.group_id, ()))


async def _read_together(
    source: Source, groups: Sequence[GroupRow], columns: Mapping[str, Sequence[StoredSample]]
) -> dict[str, list[Recorded]]:
    """What these groups have, each under its id; of none if one of them cannot be read: then each is, for itself."""
    found: dict[str, list[Recorded]] = {}
    with suppress(StorageFailed):
        samples = [sample for group in groups for sample in columns.get(group.group_id, ())]
        for row, body in await source.recorded(samples):
            found.setdefault(row.group_id, []).append((row, body))
    return found


async def _recorded(source: Source, group: GroupRow, columns: Mapping[str, Sequence[StoredSample]]) -> list[Recorded]:
    """Its samples in the order in which they came. Raises ``StorageFailed``."""
    samples = columns.get(group.group_id)
    if samples is None:
        samples = (await source.samples([group.group_id]))[group.group_id]
    return await source.recorded(samples)


def arrivals(group: GroupRow, recorded: Sequence[Recorded], settings: RunSettings) -> list[Arrival]:
    """Its samples with their times: members first, then those that came late or were too many."""
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
    """Seconds after the group opened at which its members came.

    A recording does not say when none of a group's rollouts was in flight, which is no time of its deadlines. But the
    group was open when each of them came: so its time-outs had not passed.
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
    """The same of those that are not members; where the group's time was up before they came, so it is here.

    ``last``: when its last member comes here, and came then; None without one.
    """
    at_s, before_s = last or (0.0, group.opened_s)
    if group.closed_s is not None and (group.is_salvaged or group.reason == "timed_out"):
        due_s = at_s + settings.group_timeout_seconds if last else settings.group_deadline_seconds
        at_s, before_s = min(due_s, settings.group_deadline_seconds), group.closed_s
    for sample in others:
        yield at_s + max(0.0, sample.at_s - before_s)
