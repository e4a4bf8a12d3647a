"""A recording judged as it was and as it would be: whose verdict is another, how rewards and advantages move."""

import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from forebay.core.ids import InstanceId
from forebay.replay.model import GroupRecord, RunRecord
from forebay.replay.outcomes import (
    OPEN,
    GroupOutcome,
    GroupVerdict,
    SampleOutcome,
    is_undecided,
    recorded_verdict,
    why_different,
)

MOST_POINTS = 20_000
"""Samples that a picture shows; of more, so many are drawn by chance."""
LEAST_MOVE = 1e-9
"""Differences below it are how numbers are rounded."""
Point = tuple[float | None, float, float | None, float]
"""Reward and advantage of a sample before, and after."""
LARGEST = sys.float_info.max


class Move(msgspec.Struct):
    """How a number of the samples moves: their reward, or their advantage."""

    num_before: int = 0
    """Samples that have one."""
    num_after: int = 0
    mean_before: float = 0.0
    mean_after: float = 0.0
    num_both: int = 0
    num_moved: int = 0
    """Of those that have one before and after: how many have another."""
    num_turned: int = 0
    """Of these, how many have the other sign."""
    mean_change: float = 0.0
    """Of those that have one before and after."""
    mean_size: float = 0.0
    """The mean of the absolute change."""
    largest: float = 0.0
    """The largest absolute change."""

    def note(self, before: float | None, after: float | None) -> None:
        """One sample more."""
        if before is not None:
            self.num_before += 1
            self.mean_before += _step(self.mean_before, before, self.num_before)
        if after is not None:
            self.num_after += 1
            self.mean_after += _step(self.mean_after, after, self.num_after)
        if before is None or after is None:
            return
        change = max(-LARGEST, min(LARGEST, after - before))
        self.num_both += 1
        self.num_moved += abs(change) > LEAST_MOVE
        self.num_turned += before * after < 0
        self.mean_change += _step(self.mean_change, change, self.num_both)
        self.mean_size += _step(self.mean_size, abs(change), self.num_both)
        self.largest = max(self.largest, abs(change))


class ChangedGroup(msgspec.Struct, frozen=True, gc=False):
    """A group that has another verdict, other rewards or other advantages."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    before: GroupVerdict
    after: GroupVerdict
    detail: str
    """What the buffer says of the verdict after."""
    mean_reward_before: float | None
    """Of its samples that have one; None if none has."""
    mean_reward_after: float | None
    num_rewards_changed: int
    largest_advantage_change: float
    """Of its samples, in size; 0 unless it goes out before and after."""

    @property
    def is_of_verdict(self) -> bool:
        """Whether the verdict is another."""
        return self.before != self.after


class Mismatch(msgspec.Struct, frozen=True):
    """A group whose verdict, with everything as recorded, is not that of the recording."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    recorded: GroupVerdict
    found: GroupVerdict
    why: str
    """What explains it; "" if nothing is known to."""


class DamagedGroup(msgspec.Struct, frozen=True):
    """A group that is left out, because its samples cannot be read."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    reason: str


class Advantages(msgspec.Struct):
    """Of the rows that go out, how many teach nothing."""

    num_rows: int = 0
    num_rows_without: int = 0
    """Rows whose reward after the hooks is 0."""
    num_groups: int = 0
    """Groups that go out."""
    num_groups_without: int = 0
    """Those without a row that has an advantage."""

    def note(self, outcome: GroupOutcome) -> None:
        """One group more."""
        if outcome.num_rows:
            self.num_rows += outcome.num_rows
            self.num_rows_without += outcome.num_rows_without_advantage
            self.num_groups += 1
            self.num_groups_without += outcome.num_rows == outcome.num_rows_without_advantage


class Comparison:
    """All of it, added up group by group.

    ``has_code``: as recorded, the hooks that the run had are asked, and not the built-in ones in their place.
    ``has_other_hooks``: as changed, others are asked than as recorded. ``is_changed``: anything at all is.
    """

    def __init__(self, run: RunRecord, *, has_code: bool, has_other_hooks: bool, is_changed: bool) -> None:
        self.run, self.has_code, self.is_changed = run, has_code, is_changed
        self.is_known_only_from_recording = has_other_hooks and not has_code
        """Whether verdicts as recorded are taken from the recording: no hooks that can be asked would find them."""
        self.num_groups = self.num_samples = 0
        self.num_as_recorded = self.num_undecided = 0
        self.mismatches: list[Mismatch] = []
        self.damages: list[DamagedGroup] = []
        self.unreadable: list[str] = []
        """Rows of the recording's lists that cannot be read, in words: which groups they were of is not known."""
        self.verdicts_before: Counter[str] = Counter()
        self.verdicts_after: Counter[str] = Counter()
        self.changes: list[ChangedGroup] = []
        self.rewards, self.advantages = Move(), Move()
        self.before, self.after = Advantages(), Advantages()
        self.points: list[Point] = []
        """Of samples that go out before and after."""
        self._num_points = 0
        self._chance = random.Random(0)

    def add_damaged(self, group: GroupRecord, reason: str) -> None:
        """A group that cannot be rehearsed."""
        self.damages.append(DamagedGroup(group.group_id, group.instance_id, group.epoch, reason))

    def add(self, group: GroupRecord, before: GroupOutcome, after: GroupOutcome | None = None) -> None:
        """A group as it is with everything as recorded and, if something is changed, with that."""
        self.num_groups += 1
        self.num_samples += len(before.samples)
        recorded = recorded_verdict(group)
        self._check(group, recorded, before.verdict)
        verdict = recorded if self.is_known_only_from_recording and recorded.state != OPEN else before.verdict
        self.verdicts_before[str(verdict)] += 1
        self.before.note(before)
        if after is not None:
            self.verdicts_after[str(after.verdict)] += 1
            self.after.note(after)
            self._compare(group, verdict, before, after)

    def _check(self, group: GroupRecord, recorded: GroupVerdict, found: GroupVerdict) -> None:
        if recorded == found:
            self.num_as_recorded += 1
        elif is_undecided(group, found):
            self.num_undecided += 1
        else:
            why = why_different(self.run, recorded, found, has_code=self.has_code)
            self.mismatches.append(Mismatch(group.group_id, group.instance_id, group.epoch, recorded, found, why))

    def _compare(self, group: GroupRecord, verdict: GroupVerdict, before: GroupOutcome, after: GroupOutcome) -> None:
        largest, num_changed = 0.0, 0
        for old, new in _pairs(before.samples, after.samples):
            self.rewards.note(old.reward, new.reward)
            self.advantages.note(old.advantage, new.advantage)
            num_changed += _differs(old.reward, new.reward)
            if old.advantage is not None and new.advantage is not None:
                largest = max(largest, min(LARGEST, abs(new.advantage - old.advantage)))
                self._note_point((old.reward, old.advantage, new.reward, new.advantage))
        if verdict != after.verdict or num_changed or largest > LEAST_MOVE:
            change = ChangedGroup(
                group_id=group.group_id,
                instance_id=group.instance_id,
                epoch=group.epoch,
                before=verdict,
                after=after.verdict,
                detail=after.detail,
                mean_reward_before=_mean_reward(before),
                mean_reward_after=_mean_reward(after),
                num_rewards_changed=num_changed,
                largest_advantage_change=largest,
            )
            self.changes.append(change)

    def _note_point(self, values: Point) -> None:
        self._num_points += 1
        if len(self.points) < MOST_POINTS:
            self.points.append(values)
        elif (place := self._chance.randrange(self._num_points)) < MOST_POINTS:
            self.points[place] = values

    @property
    def num_changed_verdicts(self) -> int:
        """Groups whose verdict is another."""
        return sum(change.is_of_verdict for change in self.changes)

    def kinds_of_change(self) -> Counter[tuple[str, str]]:
        """GroupVerdict before and after → how many groups go from one to the other."""
        return Counter((str(each.before), str(each.after)) for each in self.changes if each.is_of_verdict)

    def as_json(self) -> dict[str, Any]:
        """Everything but the points."""
        check = {
            "num_groups": self.num_groups,
            "num_as_recorded": self.num_as_recorded,
            "num_undecided": self.num_undecided,
            "has_code": self.has_code,
            "mismatches": self.mismatches,
        }
        facts = {
            "num_samples": self.num_samples,
            "self_check": check,
            "damaged": self.damages,
            "unreadable": self.unreadable,
        }
        before = {"verdicts": self.verdicts_before, "advantages": self.before}
        after = {"verdicts": self.verdicts_after, "advantages": self.after} if self.is_changed else None
        moves = {"rewards": self.rewards, "advantages": self.advantages} if self.is_changed else None
        document: dict[str, Any] = msgspec.to_builtins(
            {**facts, "before": before, "after": after, "moves": moves, "groups": self.changes}
        )
        return document


def _pairs(
    before: Sequence[SampleOutcome], after: Sequence[SampleOutcome]
) -> Iterator[tuple[SampleOutcome, SampleOutcome]]:
    """Each sample that the group has before, or after, or both."""
    if [sample.uid for sample in before] == [sample.uid for sample in after]:
        yield from zip(before, after, strict=True)
        return
    old, new = ({sample.uid: sample for sample in samples} for samples in (before, after))
    for uid in old | new:
        none = SampleOutcome(uid, None)
        yield old.get(uid, none), new.get(uid, none)


def _step(mean: float, value: float, num: int) -> float:
    """How the mean moves by one value more. Not by way of a difference, which may be beyond float64."""
    return value / num - mean / num


def _mean_reward(outcome: GroupOutcome) -> float | None:
    rewards = [sample.reward for sample in outcome.samples if sample.reward is not None]
    return sum(reward / len(rewards) for reward in rewards) if rewards else None


def _differs(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is not after
    return not math.isclose(before, after, rel_tol=LEAST_MOVE, abs_tol=LEAST_MOVE)
