"""A sample and a group of samples in memory."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from forebay.core.group import GroupState
from forebay.core.ids import InstanceId
from forebay.core.records.rows import GroupRow, Location, SampleRow


class Sample(msgspec.Struct, gc=False):
    """A sample in memory: its row, and its body until the disk has it."""

    row: SampleRow
    location: Location | None = None
    body: bytes | None = None
    head: bytes | None = None
    """The head of a binary sample's body, b"" for JSON; None if not known yet."""

    @property
    def num_bytes(self) -> int:
        """Length of the body."""
        return self.location.length if self.location is not None else len(self.body or b"")


class SampleGroup:
    """A group and, while it is live, its samples."""

    __slots__ = ("filled", "last_sample_at_s", "parts", "ready_at_s", "repeats", "row", "samples", "staged")

    def __init__(self, row: GroupRow) -> None:
        self.row = row
        self.samples: list[Sample] = []
        self.parts: dict[str, int] = {}
        """Bytes of the parts of its samples, by digest."""
        self.filled = bytearray()
        """1 for each slot that has its main sample. A set would need ten times as much memory."""
        self.staged: object | None = None
        """The result of the last hooks, kept until the group is delivered or changes."""
        self.repeats: set[str] = set()
        """Uids received before the run process restarted that it has not resent."""
        self.last_sample_at_s = 0.0
        """``time.monotonic`` of the last sample; 0 if none arrived since the server started."""
        self.ready_at_s = 0.0
        """``time.monotonic`` at which it became ready; 0 if that was before the server started."""

    @property
    def group_id(self) -> str:
        return self.row.group_id

    @property
    def instance_id(self) -> InstanceId:
        return self.row.instance_id

    @property
    def state(self) -> GroupState:
        return self.row.state

    @property
    def slots(self) -> set[int]:
        """Slots that have their main sample."""
        return {slot for slot, is_filled in enumerate(self.filled) if is_filled}

    @property
    def completed(self) -> list[Sample]:
        """Samples that did not fail, in order of arrival; forks follow their main sample.

        A fork whose main sample failed or is missing is left out, because unjudged samples are not trained on.
        """
        kept = [sample for sample in self.samples if sample.row.reward is not None]
        return _with_forks(kept) if self.row.num_forks else kept

    @property
    def completed_mains(self) -> list[Sample]:
        """``completed`` without forks."""
        return [sample for sample in self.samples if sample.row.reward is not None and not sample.row.fork]

    @property
    def num_completed(self) -> int:
        """Number of slots whose sample has arrived and did not fail."""
        return self.row.num_samples - self.row.num_failed

    def take(self, sample: Sample) -> None:
        """Add a sample; a fork fills no slot, a part is only counted."""
        if digest := sample.row.digest:
            self.parts[digest] = sample.num_bytes
            return
        self.samples.append(sample)
        if not sample.row.fork:
            self.filled.extend(bytes(max(0, sample.row.slot + 1 - len(self.filled))))
            self.filled[sample.row.slot] = 1

    def failures_text(self) -> str:
        """Count failed rollouts by kind, the most frequent first: ``2 engine_failure, 1 judge_failure``."""
        rows = (sample.row for sample in self.samples)
        failed = (row.rollout_outcome or "failed" for row in rows if row.reward is None and not row.fork)
        return ", ".join(f"{number} {outcome}" for outcome, number in Counter(failed).most_common())

    @property
    def num_bytes(self) -> int:
        return sum(sample.num_bytes for sample in self.samples) + sum(self.parts.values())

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the samples that did not fail; None if none names one."""
        versions = (sample.row.oldest_version for sample in self.completed)
        return min((version for version in versions if version is not None), default=None)

    def free_slot(self) -> int:
        """The lowest slot without a sample."""
        slot = self.filled.find(0)
        return len(self.filled) if slot < 0 else slot

    # --- its age: neither of its two deadlines advances while its run process reports that none of its rollouts is in
    # flight. All times are in the run's active seconds; the row stores what was counted, so it survives restarts.

    def begin_idle(self, at_s: float) -> None:
        """Stop ageing: none of its rollouts is in flight from now on."""
        if self.row.idle_since_s is None:
            self.row.idle_since_s = at_s

    def end_idle(self, at_s: float) -> None:
        """Age again."""
        row = self.row
        if row.idle_since_s is not None:
            row.idle_s, row.timeout_from_s = self.idle_seconds(at_s), self.timeout_from(at_s) or 0.0
            row.idle_since_s = None

    def idle_seconds(self, until_s: float) -> float:
        """Seconds without ageing since it opened; ``until_s`` is when it ages again if it does not now."""
        return self.row.idle_s + _since(self.row.idle_since_s, until_s)

    def age_s(self, now_s: float, until_s: float) -> float:
        """Current age, as counted by its deadline."""
        return now_s - self.row.opened_s - self.idle_seconds(min(now_s, until_s))

    def timeout_from(self, until_s: float) -> float | None:
        """When its last sample arrived, plus the time without ageing since then; None without a sample."""
        row = self.row
        if row.last_sample_s is None:
            return None
        counted_from_s = max(row.last_sample_s, row.timeout_from_s)
        since_s = None if row.idle_since_s is None else max(row.idle_since_s, counted_from_s)
        return counted_from_s + _since(since_s, until_s)


def _since(begun_s: float | None, until_s: float) -> float:
    return 0.0 if begun_s is None else max(0.0, until_s - begun_s)


def _with_forks(samples: Sequence[Sample]) -> list[Sample]:
    forks: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        if sample.row.fork:
            forks.setdefault((sample.row.slot, sample.row.rollout_id), []).append(sample)
    ordered: list[Sample] = []
    for sample in samples:
        if not sample.row.fork:
            of_it = forks.get((sample.row.slot, sample.row.rollout_id), ())
            ordered += (sample, *sorted(of_it, key=lambda fork: fork.row.fork))
    return ordered
