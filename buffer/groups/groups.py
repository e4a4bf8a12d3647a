"""Groups with their samples, as they are in memory: which are open, ready and closed. Pure: time is an argument."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from forebay.buffer.groups.alarm import AlarmCounts
from forebay.buffer.groups.losses import Losses
from forebay.buffer.groups.ready_queue import ReadyQueue
from forebay.buffer.store.rows import GroupRow, Location
from forebay.core.group import LIVE, GroupState, check_transition
from forebay.core.ids import InstanceId, group_id
from forebay.core.reward_place import Span
from forebay.core.run import RunSettings


class Sample(msgspec.Struct, gc=False):
    """A sample in memory: its index columns, and its body until the disk has it."""

    uid: str
    slot: int
    reward: float | None
    num_bytes: int
    reward_span: Span | None = None
    location: Location | None = None
    body: bytes | None = None
    rollout_id: str = ""
    oldest_version: int | None = None
    head: bytes | None = None
    """The head of a body that is a binary sample, b"" for JSON; None when that is not known yet."""
    fork: int = 0
    """Which fork of the rollout in its slot it is; 0 for the main sample."""
    rollout_outcome: str = ""
    """How its rollout ended."""
    is_foreign: bool = False
    """Whether ``rollout_id``, ``fork`` and their like in its body mean something else than ours."""


class SampleGroup:
    """A group and, while it lives, its samples."""

    __slots__ = ("repeats", "row", "samples", "slots", "staged")

    def __init__(self, row: GroupRow) -> None:
        self.row = row
        self.samples: list[Sample] = []
        self.slots: set[int] = set()
        """Those that have their main sample."""
        self.staged: object | None = None
        """What the last hooks made of it, kept until it is delivered or changes."""
        self.repeats: set[str] = set()
        """Uids that were there when the run process was restarted, and that it has not sent again."""

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
    def completed(self) -> list[Sample]:
        """The samples that did not fail, in the order in which they came; forks stand behind their main sample.

        A fork without one that did not fail is left out: what is not judged is not trained on.
        """
        kept = [sample for sample in self.samples if sample.reward is not None]
        return _with_forks(kept) if self.row.num_forks else kept

    @property
    def completed_mains(self) -> list[Sample]:
        """The same without forks."""
        return [sample for sample in self.samples if sample.reward is not None and not sample.fork]

    @property
    def num_completed(self) -> int:
        """Slots whose sample is there and did not fail."""
        return self.row.num_samples - self.row.num_failed

    def take(self, sample: Sample) -> None:
        """Add a sample; a fork fills no slot."""
        self.samples.append(sample)
        if not sample.fork:
            self.slots.add(sample.slot)

    def failures_text(self) -> str:
        """How many rollouts failed in which way, the most frequent first: ``2 engine_failure, 1 judge_failure``."""
        failed = (s.rollout_outcome or "failed" for s in self.samples if s.reward is None and not s.fork)
        return ", ".join(f"{number} {outcome}" for outcome, number in Counter(failed).most_common())

    @property
    def num_bytes(self) -> int:
        return sum(sample.num_bytes for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the samples that did not fail; None if none of them tells."""
        versions = (sample.oldest_version for sample in self.completed)
        return min((version for version in versions if version is not None), default=None)

    def free_slot(self) -> int:
        """The lowest slot without a sample."""
        # Samples mostly fill slots in order: then it is this one.
        slot = len(self.slots)
        if slot not in self.slots:
            return slot
        return next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots)


def _with_forks(samples: Sequence[Sample]) -> list[Sample]:
    forks: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        if sample.fork:
            forks.setdefault((sample.slot, sample.rollout_id), []).append(sample)
    ordered: list[Sample] = []
    for sample in samples:
        if not sample.fork:
            of_it = forks.get((sample.slot, sample.rollout_id), ())
            ordered += (sample, *sorted(of_it, key=lambda fork: fork.fork))
    return ordered


@dataclass
class Groups:
    """The groups of one run."""

    run_id: str
    settings: RunSettings
    by_id: dict[str, SampleGroup] = field(default_factory=dict)
    by_instance: dict[InstanceId, list[SampleGroup]] = field(default_factory=dict)
    changed: dict[str, SampleGroup] = field(default_factory=dict)
    """Open groups that got a sample since ``is_valid_group`` was last asked."""
    short_valid: dict[str, SampleGroup] = field(default_factory=dict)
    """Open groups that are valid although slots are empty."""
    unreported: dict[str, SampleGroup] = field(default_factory=dict)
    """Discarded groups that no successful reply has listed as finished."""
    closed: list[SampleGroup] = field(default_factory=list)
    """Every group that left the open state, in the order of ``closed_seq``."""
    states: Counter[GroupState] = field(default_factory=Counter)
    discard_reasons: Counter[str] = field(default_factory=Counter)
    alarm: AlarmCounts = field(default_factory=AlarmCounts)
    losses: Losses = field(init=False)
    num_live_samples: int = 0
    num_live_bytes: int = 0
    next_order: int = 1
    first_epochs: Counter[InstanceId] = field(default_factory=Counter)
    """For a writer that sends no epoch: the first epoch of an instance (those before it are skipped)."""
    unscheduled: list[SampleGroup] = field(default_factory=list)
    """Groups that opened, or got their first sample, since their deadlines were last looked at."""
    _ready: ReadyQueue = field(init=False)

    def __post_init__(self) -> None:
        self.losses = Losses(self.run_id)
        self._ready = ReadyQueue(lambda key: self.by_id[key].state is GroupState.READY)

    def adopt(self, settings: RunSettings, base_skip: Iterable[InstanceId]) -> None:
        """Go on under the settings of another start of the run."""
        self.settings = settings
        self.first_epochs = Counter(base_skip)

    # --- opening and filling

    def open(self, instance_id: InstanceId, epoch: int, now_s: float, *, is_announced: bool = False) -> SampleGroup:
        """Open the group of ``instance_id`` in ``epoch``; the one that is there if it was opened before."""
        key = group_id(instance_id, epoch)
        group = self.by_id.get(key)
        if group is None:
            group = self._insert(self.new_row(instance_id, epoch, now_s, is_announced=is_announced))
            self.unscheduled.append(group)
        return group

    def new_row(self, instance_id: InstanceId, epoch: int, now_s: float, *, is_announced: bool = False) -> GroupRow:
        """The row of the next group to open."""
        return GroupRow(
            run_id=self.run_id,
            group_id=group_id(instance_id, epoch),
            instance_id=instance_id,
            epoch=epoch,
            state=GroupState.OPEN,
            opened_s=now_s,
            number=len(self.by_id) + 1,
            is_announced=is_announced,
        )

    def add(self, group: SampleGroup, sample: Sample, now_s: float) -> None:
        """Put a member sample into its group."""
        row = group.row
        group.take(sample)
        group.staged = None  # the hooks judged it without this sample
        row.last_sample_s = now_s
        _count(row, sample)
        self.num_live_samples += 1
        self.num_live_bytes += sample.num_bytes
        self.changed[row.group_id] = group
        if len(group.samples) == 1:
            self.unscheduled.append(group)

    def is_full(self, group: SampleGroup) -> bool:
        """Whether every slot has its sample, failed ones included."""
        return group.row.num_samples >= self.settings.group_size

    @property
    def num_full(self) -> int:
        """How many open groups are full: ``is_valid_group`` is asked about them by the next read, or at the end."""
        return sum(self.is_full(group) for group in self.changed.values())

    # --- moving

    def move(self, group: SampleGroup, target: GroupState, now_s: float, reason: str = "", detail: str = "") -> None:
        """Bring a group into another state and keep every list in step. Raises ``ValueError`` for a forbidden one."""
        row, source = group.row, group.state
        # Before anything changes, so that a forbidden move leaves no trace.
        check_transition(source, target)
        self.states[source] -= 1
        self.states[target] += 1
        row.state = target
        self.alarm.note(source, target, reason)
        if source is GroupState.OPEN:
            self._close(group, now_s)
        if target is GroupState.READY:
            if not row.order:  # one that comes back keeps its place in the order of delivery
                row.order, self.next_order = self.next_order, self.next_order + 1
            # It may be queued from an earlier time; the queue takes it once.
            self._ready.put(group.group_id, row.order)
            self._ready.note_version(group.group_id, group.oldest_version)
        elif target is GroupState.DISCARDED:
            row.reason, row.detail = reason, detail
            self.discard_reasons[reason] += 1
            self.losses.note(row, self.settings)
            self.unreported[group.group_id] = group
        if (source in LIVE) and (target not in LIVE):
            self._forget_samples(group)

    def _close(self, group: SampleGroup, now_s: float) -> None:
        self.changed.pop(group.group_id, None)
        self.short_valid.pop(group.group_id, None)
        group.row.closed_s = now_s
        # Those who follow closed groups ask for what came behind the number that they know.
        self.closed.append(group)
        group.row.closed_seq = len(self.closed)

    def _forget_samples(self, group: SampleGroup) -> None:
        # Memory holds what may be delivered; whatever comes back later is read from the store.
        self.num_live_samples -= len(group.samples)
        self.num_live_bytes -= group.num_bytes
        group.samples, group.slots, group.staged = [], set(), None

    def revive(self, group: SampleGroup, samples: Iterable[Sample]) -> None:
        """Give a delivered group its samples back, before it becomes ready again."""
        for sample in samples:
            group.take(sample)
        self.num_live_samples += len(group.samples)
        self.num_live_bytes += group.num_bytes

    # --- in order

    def take_ready(self) -> Iterator[SampleGroup]:
        """Ready groups, oldest first. The caller gives back with ``put_back`` those that it leaves ready."""
        return map(self.by_id.__getitem__, self._ready.take())

    def put_back(self, groups: Iterable[SampleGroup]) -> None:
        """Queue ready groups again after ``take_ready``."""
        for group in groups:
            self._ready.put(group.group_id, group.row.order)

    def take_older(self, version: int) -> list[SampleGroup]:
        """The ready groups with a sample of older weights than ``version``; each is found once."""
        return [self.by_id[key] for key in self._ready.take_older(version)]

    # --- all of them

    def in_state(self, *states: GroupState) -> list[SampleGroup]:
        """The groups in any of ``states``, in the order in which they opened."""
        return [group for group in self.by_id.values() if group.state in states]

    def is_any(self, *states: GroupState) -> bool:
        """Whether any group is in one of ``states``."""
        return any(self.states[state] for state in states)

    def _insert(self, row: GroupRow) -> SampleGroup:
        group = SampleGroup(row)
        self.by_id[row.group_id] = group
        self.by_instance.setdefault(row.instance_id, []).append(group)
        self.states[row.state] += 1
        return group

    def restore(self, rows: Iterable[GroupRow]) -> None:
        """Take over stored groups, before ``restore_sample`` gives the live ones their samples."""
        for row in rows:
            group = self._insert(row)
            self.next_order = max(self.next_order, row.order + 1)
            if row.state is GroupState.OPEN:
                # `restore_sample` counts them: a row that was written before its last samples knows less.
                row.num_samples, row.num_failed, row.num_forks, row.last_sample_s = 0, 0, 0, None
            elif row.state is GroupState.READY:
                self._ready.put(row.group_id, row.order)
            elif row.state is GroupState.DISCARDED:
                self.discard_reasons[row.reason] += 1
                self.losses.note(row, self.settings)
                if not row.is_reported:
                    self.unreported[row.group_id] = group
        # The alarm goes on where it was: the last groups that ended undelivered, one after the other.
        self.closed = sorted((g for g in self.by_id.values() if g.row.closed_seq), key=lambda g: g.row.closed_seq)
        for group in takewhile(lambda group: group.state is GroupState.DISCARDED, reversed(self.closed)):
            self.alarm.note(GroupState.OPEN, GroupState.DISCARDED, group.row.reason)

    def restore_sample(self, key: str, sample: Sample, at_s: float) -> None:
        """Give a live group a stored sample, in the order in which they came."""
        group = self.by_id[key]
        group.take(sample)
        self.num_live_samples += 1
        self.num_live_bytes += sample.num_bytes
        if group.state is GroupState.OPEN:
            _count(group.row, sample)
            group.row.last_sample_s = at_s
            self.changed[key] = group

    def restored(self) -> None:
        """Every stored sample is where it was: note of which weights the ready groups are."""
        for group in self.in_state(GroupState.READY):
            self._ready.note_version(group.group_id, group.oldest_version)


def _count(row: GroupRow, sample: Sample) -> None:
    """Count another sample of an open group: a fork fills no slot."""
    if sample.fork:
        row.num_forks += 1
    else:
        row.num_samples += 1
        row.num_failed += sample.reward is None
