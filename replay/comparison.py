"""Compares a recording as judged then and as judged with changes: verdicts, rewards and advantages."""

import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import GroupRow
from forebay.replay.outcomes import OPEN, GroupOutcome, GroupVerdict, SampleOutcome, is_undecided, recorded_verdict

LEAST_MOVE = 1e-9
"""Smaller differences are rounding errors."""
LARGEST = sys.float_info.max


class Move:
    """How one number of the samples changes: their rewards, or their advantages."""

    def __init__(self) -> None:
        self.before, self.after = array("d"), array("d")
        """The values of all samples that have one."""
        self.num_both = self.num_moved = 0
        """Samples with a value before and after, and those of them whose value differs."""
        self.largest = 0.0
        """The largest absolute change."""

    def note(self, before: float | None, after: float | None) -> float:
        """Add one sample; returns the size of its change."""
        if before is not None:
            self.before.append(before)
        if after is not None:
            self.after.append(after)
        if before is None or after is None:
            return 0.0
        change = min(LARGEST, abs(after - before))
        self.num_both += 1
        self.num_moved += change > LEAST_MOVE
        self.largest = max(self.largest, change)
        return change

    def means(self) -> tuple[float, float]:
        """Means before and after; 0 if no sample has a value."""
        # Divided before adding: the sum may exceed float64.
        before, after = (sum((value / len(values) for value in values), 0.0) for values in (self.before, self.after))
        return before, after

    def as_json(self) -> dict[str, float]:
        """Everything but the values of single samples."""
        before, after = self.means()
        counts = {"num_both": self.num_both, "num_moved": self.num_moved}
        return {**counts, "mean_before": before, "mean_after": after, "largest": self.largest}


class ChangedGroup(msgspec.Struct, frozen=True, gc=False):
    """A group whose verdict, rewards or advantages differ."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    before: GroupVerdict
    after: GroupVerdict
    detail: str
    """The buffer's explanation of the new verdict."""
    mean_reward_before: float | None
    """Mean over the samples that have a reward; None if none has."""
    mean_reward_after: float | None
    largest_advantage_change: float
    """The largest absolute change among its samples; 0 unless the group is delivered both before and after."""

    @property
    def is_of_verdict(self) -> bool:
        """Whether the verdict differs."""
        return self.before != self.after


class Mismatch(msgspec.Struct, frozen=True):
    """A group whose verdict differs from the recording although nothing was changed."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    recorded: GroupVerdict
    found: GroupVerdict


class DamagedGroup(msgspec.Struct, frozen=True):
    """A group that is skipped because its samples cannot be read."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    reason: str


class Comparison:
    """The whole comparison, added up group by group.

    ``has_code``: the run's own hooks are available, not just the built-in ones. ``has_other_hooks``: the changed side
    uses other hooks than the recorded side. ``is_changed``: at least one thing was changed.
    """

    def __init__(self, run: RecordedRun, *, has_code: bool, has_other_hooks: bool, is_changed: bool) -> None:
        self.run, self.has_code, self.is_changed = run, has_code, is_changed
        self.is_known_only_from_recording = has_other_hooks and not has_code
        """Whether recorded verdicts are read from the recording, because no available hook could reproduce them."""
        self.num_groups = self.num_samples = 0
        self.num_as_recorded = self.num_undecided = 0
        self.mismatches: list[Mismatch] = []
        self.damages: list[DamagedGroup] = []
        self.verdicts_before: Counter[str] = Counter()
        self.verdicts_after: Counter[str] = Counter()
        self.changes: list[ChangedGroup] = []
        self.rewards, self.advantages = Move(), Move()

    def add_damaged(self, group: GroupRow, reason: str) -> None:
        """Add a group that cannot be rehearsed."""
        self.damages.append(DamagedGroup(group.group_id, group.instance_id, group.epoch, reason))

    def add(self, group: GroupRow, before: GroupOutcome, after: GroupOutcome | None = None) -> None:
        """Add a group: its outcome with everything as recorded and, if something is changed, with the change."""
        self.num_groups += 1
        self.num_samples += len(before.samples)
        recorded = recorded_verdict(group)
        self._check(group, recorded, before.verdict)
        verdict = recorded if self.is_known_only_from_recording and recorded.state != OPEN else before.verdict
        self.verdicts_before[str(verdict)] += 1
        if after is not None:
            self.verdicts_after[str(after.verdict)] += 1
            self._compare(group, verdict, before, after)

    def _check(self, group: GroupRow, recorded: GroupVerdict, found: GroupVerdict) -> None:
        if recorded == found:
            self.num_as_recorded += 1
        elif is_undecided(group, found):
            self.num_undecided += 1
        else:
            self.mismatches.append(Mismatch(group.group_id, group.instance_id, group.epoch, recorded, found))

    def _compare(self, group: GroupRow, verdict: GroupVerdict, before: GroupOutcome, after: GroupOutcome) -> None:
        largest, has_other_reward = 0.0, False
        for old, new in _pairs(before.samples, after.samples):
            self.rewards.note(old.reward, new.reward)
            has_other_reward |= _differs(old.reward, new.reward)
            largest = max(largest, self.advantages.note(old.advantage, new.advantage))
        if verdict != after.verdict or has_other_reward or largest > LEAST_MOVE:
            change = ChangedGroup(
                group_id=group.group_id,
                instance_id=group.instance_id,
                epoch=group.epoch,
                before=verdict,
                after=after.verdict,
                detail=after.detail,
                mean_reward_before=_mean_reward(before),
                mean_reward_after=_mean_reward(after),
                largest_advantage_change=largest,
            )
            self.changes.append(change)

    def kinds_of_change(self) -> Counter[tuple[str, str]]:
        """Verdict before and after → how many groups change from one to the other."""
        return Counter((str(each.before), str(each.after)) for each in self.changes if each.is_of_verdict)

    def as_json(self) -> dict[str, Any]:
        """Everything but the values of single samples."""
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
        }
        before = {"verdicts": self.verdicts_before}
        after = {"verdicts": self.verdicts_after} if self.is_changed else None
        moved = {"rewards": self.rewards.as_json(), "advantages": self.advantages.as_json()}
        moves = moved if self.is_changed else None
        document: dict[str, Any] = msgspec.to_builtins(
            {**facts, "before": before, "after": after, "moves": moves, "groups": self.changes}
        )
        return document


def _pairs(
    before: Sequence[SampleOutcome], after: Sequence[SampleOutcome]
) -> Iterator[tuple[SampleOutcome, SampleOutcome]]:
    """Each sample that the group has before, after, or both."""
    if [sample.uid for sample in before] == [sample.uid for sample in after]:
        yield from zip(before, after, strict=True)
        return
    old, new = ({sample.uid: sample for sample in samples} for samples in (before, after))
    for uid in old | new:
        none = SampleOutcome(uid, None)
        yield old.get(uid, none), new.get(uid, none)


def _mean_reward(outcome: GroupOutcome) -> float | None:
    rewards = [sample.reward for sample in outcome.samples if sample.reward is not None]
    return sum(reward / len(rewards) for reward in rewards) if rewards else None


def _differs(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is not after
    return not math.isclose(before, after, rel_tol=LEAST_MOVE, abs_tol=LEAST_MOVE)
