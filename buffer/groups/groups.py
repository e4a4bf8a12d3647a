"""Groups with their samples in memory: which are open, ready and closed. Pure: time is an argument."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from forebay.buffer.groups.alarm import AlarmCounts, Losses
from forebay.buffer.groups.ready_queue import ReadyQueue
from forebay.buffer.groups.sample_group import Sample, SampleGroup
from forebay.core.group import LIVE, GroupState, check_transition
from forebay.core.ids import InstanceId, group_id
from forebay.core.records.rows import GroupRow
from forebay.core.run import RunSettings

OnChange = Callable[[SampleGroup, GroupState | None], None]
"""Receives a group that has entered a state, and its previous state; None for a new group."""


def _nobody(_group: SampleGroup, _source: GroupState | None) -> None:
    pass


@dataclass
class Groups:
    """The groups of one run."""

    run_id: str
    settings: RunSettings
    on_change: OnChange = _nobody
    by_id: dict[str, SampleGroup] = field(default_factory=dict)
    """Groups in memory; groups that are done may be only in the store."""
    by_instance: dict[InstanceId, list[SampleGroup]] = field(default_factory=dict)
    changed: dict[str, SampleGroup] = field(default_factory=dict)
    """Open groups that got a sample since ``is_valid_group`` was last asked."""
    short_valid: dict[str, SampleGroup] = field(default_factory=dict)
    """Open groups that are valid although some slots are empty."""
    idle: dict[str, SampleGroup] = field(default_factory=dict)
    """Open groups that do not age, because none of their rollouts is in flight."""
    unreported: dict[str, SampleGroup] = field(default_factory=dict)
    """Discarded groups that no successful reply has listed as finished."""
    closed: dict[int, SampleGroup] = field(default_factory=dict)
    """Groups in memory that left the open state, by ``closed_seq``."""
    done: list[str] = field(default_factory=list)
    """Groups that were acknowledged, or whose report was, since eviction was last considered."""
    num_opened: int = 0
    num_closed: int = 0
    states: Counter[GroupState] = field(default_factory=Counter)
    """Number of groups in each state, including groups not in memory."""
    discard_reasons: Counter[str] = field(default_factory=Counter)
    alarm: AlarmCounts = field(default_factory=AlarmCounts)
    losses: Losses = field(init=False)
    num_live_samples: int = 0
    num_live_bytes: int = 0
    next_order: int = 1
    first_epochs: Counter[InstanceId] = field(default_factory=Counter)
    """For writers without epochs: the first epoch of an instance (earlier ones are skipped)."""
    unscheduled: list[SampleGroup] = field(default_factory=list)
    """Groups whose deadline may be earlier since the last check: they opened, got a first sample, or age again."""
    _ready: ReadyQueue = field(init=False)
    _undelivered: dict[int, str] = field(default_factory=dict)
    """Only during restore: reasons of discarded groups after ``_last_useful``, by ``closed_seq``."""
    _last_useful: int = 0

    def __post_init__(self) -> None:
        self.losses = Losses(self.run_id)
        self._ready = ReadyQueue(self._is_ready)

    def adopt(self, settings: RunSettings, base_skip: Iterable[InstanceId]) -> None:
        """Use the settings of another start of the run."""
        self.settings = settings
        self.first_epochs = Counter(base_skip)

    def _is_ready(self, key: str) -> bool:
        group = self.by_id.get(key)  # the queue may still contain an evicted group
        return group is not None and group.state is GroupState.READY

    # --- opening and filling

    def open(self, instance_id: InstanceId, epoch: int, now_s: float) -> SampleGroup:
        """Open the group of ``instance_id`` in ``epoch``, or return the existing one."""
        key = group_id(instance_id, epoch)
        group = self.by_id.get(key)
        if group is None:
            group = self._insert(self.new_row(instance_id, epoch, now_s))
            self.unscheduled.append(group)
            self.on_change(group, None)
        return group

    def new_row(self, instance_id: InstanceId, epoch: int, now_s: float) -> GroupRow:
        """Make the row of the next group to open."""
        return GroupRow(
            run_id=self.run_id,
            group_id=group_id(instance_id, epoch),
            instance_id=instance_id,
            epoch=epoch,
            state=GroupState.OPEN,
            opened_s=now_s,
            number=self.num_opened + 1,
        )

    def add(self, group: SampleGroup, sample: Sample, now_s: float) -> None:
        """Add a member sample to its group."""
        row = group.row
        group.take(sample)
        group.staged = None  # the hooks judged the group without this sample
        row.last_sample_s = now_s
        _count(row, sample)
        self.num_live_samples += 1
        self.num_live_bytes += sample.num_bytes
        self.changed[row.group_id] = group
        if len(group.samples) == 1:
            self.unscheduled.append(group)
        if self.idle and self.is_full(group):  # none of its rollouts will be in flight any more
            self.set_busy(group, now_s)

    def add_part(self, key: str, digest: str, num_bytes: int) -> None:
        """Note a part of a group's samples."""
        self.by_id[key].parts[digest] = num_bytes
        self.num_live_bytes += num_bytes

    def is_full(self, group: SampleGroup) -> bool:
        """Whether every slot has its sample, including failed ones."""
        return group.row.num_samples >= self.settings.group_size

    @property
    def num_full(self) -> int:
        """Number of full open groups: the next read, or the end, calls ``is_valid_group`` for them."""
        return sum(self.is_full(group) for group in self.changed.values())

    # --- ageing

    def set_idle(self, group: SampleGroup, now_s: float) -> bool:
        """Stop an open group from ageing; False if it already does not age, or is full."""
        if group.state is not GroupState.OPEN or group.group_id in self.idle or self.is_full(group):
            return False
        self.idle[group.group_id] = group
        group.begin_idle(now_s)
        return True

    def set_busy(self, group: SampleGroup, now_s: float) -> bool:
        """Let a group age again; False if it already ages."""
        if self.idle.pop(group.group_id, None) is None:
            return False
        group.end_idle(now_s)
        self.unscheduled.append(group)
        return True

    # --- moving

    def move(self, group: SampleGroup, target: GroupState, now_s: float, reason: str = "", detail: str = "") -> None:
        """Move a group to another state and update every list. Raises ``ValueError`` for a forbidden transition."""
        row, source = group.row, group.state
        # Checked before anything changes, so that a forbidden move has no effect.
        check_transition(source, target)
        self.states[source] -= 1
        self.states[target] += 1
        row.state = target
        self.alarm.note(source, target, reason)
        if source is GroupState.OPEN:
            self._close(group, now_s)
        if target is GroupState.READY:
            if not row.order:  # a group that becomes ready again keeps its position in the order of delivery
                row.order, self.next_order = self.next_order, self.next_order + 1
            # It may already be queued; the queue ignores the repetition.
            self._ready.put(group.group_id, row.order)
            self._ready.note_version(group.group_id, group.oldest_version)
        elif target is GroupState.ACKED:
            self.done.append(group.group_id)
        elif target is GroupState.DISCARDED:
            row.reason, row.detail = reason, detail
            self.discard_reasons[reason] += 1
            self.losses.note(row, self.settings)
            self.unreported[group.group_id] = group
        if (source in LIVE) and (target not in LIVE):
            self._forget_samples(group)
        self.on_change(group, source)

    def _close(self, group: SampleGroup, now_s: float) -> None:
        self.changed.pop(group.group_id, None)
        self.short_valid.pop(group.group_id, None)
        self.idle.pop(group.group_id, None)
        group.end_idle(now_s)
        group.row.closed_s = now_s
        # Followers of closed groups ask for those after the number that they know.
        self.num_closed += 1
        group.row.closed_seq = self.num_closed
        self.closed[self.num_closed] = group

    def _forget_samples(self, group: SampleGroup) -> None:
        # Memory holds what may be delivered; groups that become ready again are read from the store.
        self.num_live_samples -= len(group.samples)
        self.num_live_bytes -= group.num_bytes
        group.samples, group.parts, group.filled, group.staged = [], {}, bytearray(), None

    def revive(self, group: SampleGroup, samples: Iterable[Sample]) -> None:
        """Restore the samples of a delivered group before it becomes ready again."""
        for sample in samples:
            group.take(sample)
        self.num_live_samples += len(group.samples)
        self.num_live_bytes += group.num_bytes

    # --- in order

    def take_ready(self) -> Iterator[SampleGroup]:
        """Take ready groups, oldest first. The caller returns those that it leaves ready with ``put_back``."""
        return map(self.by_id.__getitem__, self._ready.take())

    def put_back(self, groups: Iterable[SampleGroup]) -> None:
        """Queue ready groups again after ``take_ready``."""
        for group in groups:
            self._ready.put(group.group_id, group.row.order)

    def take_older(self, version: int) -> list[SampleGroup]:
        """Ready groups with a sample from weights older than ``version``; each group is found once."""
        return [self.by_id[key] for key in self._ready.take_older(version)]

    # --- all groups

    def in_state(self, *states: GroupState) -> list[SampleGroup]:
        """Groups in any of ``states``, in the order in which they opened."""
        return [group for group in self.by_id.values() if group.state in states]

    def is_any(self, *states: GroupState) -> bool:
        """Whether any group is in one of ``states``."""
        return any(self.states[state] for state in states)

    def _insert(self, row: GroupRow) -> SampleGroup:
        group = self._put(row)
        self.num_opened += 1
        self.states[row.state] += 1
        return group

    def _put(self, row: GroupRow) -> SampleGroup:
        group = SampleGroup(row)
        self.by_id[row.group_id] = group
        of_instance = self.by_instance.setdefault(row.instance_id, [])
        # Usually at the end; a group that was looked up is inserted at its old position.
        insort(of_instance, group, key=lambda other: other.row.number)
        return group

    # --- groups that memory need not hold

    def forget(self, group: SampleGroup) -> None:
        """Evict a group that the store has; it still counts."""
        del self.by_id[group.group_id]
        self.closed.pop(group.row.closed_seq, None)
        of_instance = self.by_instance[group.instance_id]
        of_instance.remove(group)
        if not of_instance:
            del self.by_instance[group.instance_id]

    def recall(self, row: GroupRow) -> bool:
        """Load an evicted group; False if it is in memory."""
        if row.group_id in self.by_id:
            return False
        group = self._put(row)
        if row.closed_seq:
            self.closed[row.closed_seq] = group
        return True

    # --- after loading

    def restore(self, rows: Iterable[GroupRow], keeps: Callable[[GroupRow], bool]) -> None:
        """Load stored groups, before ``restore_sample`` gives the live ones their samples.

        Only groups for which ``keeps`` is true stay in memory; all of them count.
        """
        for row in rows:
            if keeps(row):
                self._restore_kept(row)
            self.num_opened += 1
            self.num_closed = max(self.num_closed, row.closed_seq)
            self.next_order = max(self.next_order, row.order + 1)
            self.states[row.state] += 1
            if row.state is GroupState.DISCARDED:
                self.discard_reasons[row.reason] += 1
                self.losses.note(row, self.settings)
                self._undelivered[row.closed_seq] = row.reason
            elif row.closed_seq:
                self._last_useful = max(self._last_useful, row.closed_seq)
        self._undelivered = {seq: reason for seq, reason in self._undelivered.items() if seq > self._last_useful}

    def _restore_kept(self, row: GroupRow) -> None:
        self.recall(row)
        if row.state is GroupState.OPEN:
            # `restore_sample` counts them: a row written before the last samples has lower counts.
            row.num_samples, row.num_failed, row.num_forks, row.last_sample_s = 0, 0, 0, None
            if row.idle_since_s is not None:
                self.idle[row.group_id] = self.by_id[row.group_id]
        elif row.state is GroupState.READY:
            self._ready.put(row.group_id, row.order)
        elif row.state is GroupState.DISCARDED and not row.is_reported:
            self.unreported[row.group_id] = self.by_id[row.group_id]

    def restore_sample(self, sample: Sample) -> SampleGroup:
        """Add a stored sample or part to its live group; called in order of arrival."""
        key = sample.row.group_id
        group = self.by_id[key]
        group.take(sample)
        self.num_live_bytes += sample.num_bytes
        if sample.row.digest:
            return group
        self.num_live_samples += 1
        if group.state is GroupState.OPEN:
            _count(group.row, sample)
            group.row.last_sample_s = sample.row.at_s
            self.changed[key] = group
        return group

    def restored(self) -> None:
        """Finish restoring: record the weight versions of ready groups."""
        # The alarm resumes with the last groups in a row that ended undelivered.
        for number in sorted(self._undelivered):
            self.alarm.note(GroupState.OPEN, GroupState.DISCARDED, self._undelivered[number])
        self._undelivered.clear()
        for group in list(self.idle.values()):
            if self.is_full(group):  # its last sample was stored after its row
                self.set_busy(group, group.row.last_sample_s or 0.0)
        for group in self.in_state(GroupState.READY):
            self._ready.note_version(group.group_id, group.oldest_version)

    def hold_back_parts(self) -> None:
        """Ask no hook about incomplete open groups until they get another sample."""
        for group in [group for group in self.changed.values() if not self.is_full(group)]:
            del self.changed[group.group_id]


def _count(row: GroupRow, sample: Sample) -> None:
    """Count another sample of an open group; a fork fills no slot."""
    if sample.row.fork:
        row.num_forks += 1
    else:
        row.num_samples += 1
        row.num_failed += sample.row.reward is None
