"""Which group a sample belongs to, and which groups are open, ready and closed. Pure: time is an argument."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from forebay.buffer.groups.alarm import Fruitless
from forebay.buffer.groups.group import Placement, Sample, SampleGroup
from forebay.buffer.groups.ready_queue import ReadyQueue
from forebay.buffer.store.rows import GroupRow
from forebay.core.group import LIVE, GroupState, check_transition
from forebay.core.ids import InstanceId, group_id
from forebay.core.run import RunSettings
from forebay.core.sample import Incoming

__all__ = ["Groups", "Placement", "Sample", "SampleGroup"]


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
    fruitless: Fruitless = field(default_factory=Fruitless)
    num_live_samples: int = 0
    num_live_bytes: int = 0
    next_order: int = 1
    first_epochs: Counter[InstanceId] = field(default_factory=Counter)
    """For a writer that sends no epoch: the first epoch of an instance (those before it are skipped)."""
    _ready: ReadyQueue = field(init=False)
    _due: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ready = ReadyQueue(lambda key: self.by_id[key].state is GroupState.READY)

    def adopt(self, settings: RunSettings, base_skip: Iterable[InstanceId]) -> None:
        """Go on under the settings of another start of the run."""
        self.settings = settings
        self.first_epochs = Counter(base_skip)
        self.schedule_all()

    # --- opening and filling

    def open(self, instance_id: InstanceId, epoch: int, now_s: float, *, is_announced: bool = False) -> SampleGroup:
        """Open the group of ``instance_id`` in ``epoch``; the one that is there if it was opened before."""
        key = group_id(instance_id, epoch)
        group = self.by_id.get(key)
        if group is None:
            group = self._insert(self._new_row(key, instance_id, epoch, now_s, is_announced=is_announced))
            self.schedule(group)
        return group

    def _new_row(
        self, key: str, instance_id: InstanceId, epoch: int, now_s: float, *, is_announced: bool = False
    ) -> GroupRow:
        return GroupRow(
            run_id=self.run_id,
            group_id=key,
            instance_id=instance_id,
            epoch=epoch,
            state=GroupState.OPEN,
            opened_s=now_s,
            number=len(self.by_id) + 1,
            is_announced=is_announced,
        )

    def place(self, sample: Incoming, now_s: float) -> Placement:
        """Decide where a sample belongs, opening a group where that is needed."""
        if sample.epoch is None:
            return self._place_next(sample.instance_id, now_s)
        placement = self._place_at(sample.instance_id, sample.epoch, sample.slot, now_s, is_fork=sample.fork > 0)
        if sample.fork and placement.outcome == "member" and _is_of_another(placement, sample.rollout_id):
            return Placement(placement.group, placement.slot, "surplus")
        return placement

    def would_open(self, instance_id: InstanceId, epoch: int | None, now_s: float) -> bool:
        """Whether a sample would need a new group."""
        if epoch is not None:
            return group_id(instance_id, epoch) not in self.by_id
        groups = self.by_instance.get(instance_id)
        return not groups or self._next_home(groups, now_s) is None

    def add(self, placement: Placement, sample: Sample, now_s: float) -> None:
        """Put a member sample into its group."""
        group, row = placement.group, placement.group.row
        group.take(sample)
        group.staged = None
        row.last_sample_s = now_s
        _count(row, sample)
        self.num_live_samples += 1
        self.num_live_bytes += sample.num_bytes
        self.changed[row.group_id] = group
        if len(group.samples) == 1:
            self.schedule(group)

    def is_full(self, group: SampleGroup) -> bool:
        """Whether every slot has its sample, failed ones included."""
        return group.row.num_samples >= self.settings.group_size

    def _place_at(
        self, instance_id: InstanceId, epoch: int, slot: int | None, now_s: float, *, is_fork: bool
    ) -> Placement:
        if slot is not None and slot >= self.settings.group_size:
            key = group_id(instance_id, epoch)
            if key not in self.by_id:
                return Placement(
                    SampleGroup(self._new_row(key, instance_id, epoch, now_s)), slot, "surplus"
                )  # opens nothing
        group = self.open(instance_id, epoch, now_s)
        if group.state is not GroupState.OPEN:
            return Placement(group, -1 if slot is None else slot, "late")
        if slot is None:
            slot = group.free_slot()
        if is_fork:
            return Placement(group, slot, "member" if slot < self.settings.group_size else "surplus")
        if self.is_full(group) or slot in group.slots or slot >= self.settings.group_size:
            return Placement(group, slot, "surplus")
        return Placement(group, slot, "member")

    def _place_next(self, instance_id: InstanceId, now_s: float) -> Placement:
        groups = self.by_instance.get(instance_id, [])
        home = self._next_home(groups, now_s)
        if home is None:
            epoch = max((group.row.epoch + 1 for group in groups), default=self.first_epochs[instance_id])
            home = self.open(instance_id, epoch, now_s)
        if home.state is GroupState.OPEN and not self.is_full(home):
            return Placement(home, home.free_slot(), "member")
        if home.row.surplus_due > 0:
            home.row.surplus_due -= 1
            return Placement(home, -1, "surplus", is_group_changed=True)
        return Placement(home, -1, "late")

    def _next_home(self, groups: list[SampleGroup], now_s: float) -> SampleGroup | None:
        """The group that takes the next sample of a writer which sends no epoch; None when a new one must open."""
        for group in groups:
            if group.state is GroupState.OPEN and not self.is_full(group):
                return group
        for group in groups:
            if group.row.surplus_due > 0:
                return group
        if groups and self._is_late(groups[-1].row, now_s):
            return groups[-1]
        return None

    def _is_late(self, row: GroupRow, now_s: float) -> bool:
        is_short = row.num_samples < self.settings.group_size
        return is_short and row.closed_s is not None and now_s - row.closed_s <= self.settings.group_timeout_seconds

    # --- repeats of a restarted process that sends no slots

    def expect_repeats(self) -> list[SampleGroup]:
        """It will send the samples of incomplete groups once more, and those of others not; the groups that changed."""
        changed: list[SampleGroup] = []
        for group in self.by_id.values():
            is_incomplete = group.state is GroupState.OPEN and not self.is_full(group)
            group.repeats = {s.uid for s in group.samples if not s.fork} if is_incomplete else set()
            due = len(group.repeats)
            if due != group.row.surplus_due:
                group.row.surplus_due = due
                changed.append(group)
        return changed

    def note_repeat(self, instance_id: InstanceId, uid: str) -> SampleGroup | None:
        """A known uid came again: the group that expected it, and has one surplus sample less to come."""
        for group in self.by_instance.get(instance_id, ()):
            if uid in group.repeats and group.row.surplus_due > 0:
                group.repeats.discard(uid)
                group.row.surplus_due -= 1
                return group
        return None

    # --- moving

    def move(self, group: SampleGroup, target: GroupState, now_s: float, reason: str = "", detail: str = "") -> None:
        """Bring a group into another state and keep every list in step. Raises ``ValueError`` for a forbidden one."""
        row, source = group.row, group.state
        check_transition(source, target)
        self.states[source] -= 1
        self.states[target] += 1
        row.state = target
        self.fruitless.note(source, target, reason)
        if source is GroupState.OPEN:
            self._close(group, now_s)
        if target is GroupState.READY:
            row.order = row.order or self._take_order()
            self._ready.put(group.group_id, row.order)
            self._ready.note_version(group.group_id, group.oldest_version)
        elif target is GroupState.DISCARDED:
            row.reason, row.detail = reason, detail
            self.discard_reasons[reason] += 1
            self.unreported[group.group_id] = group
        if (source in LIVE) and (target not in LIVE):
            self._forget_samples(group)

    def _close(self, group: SampleGroup, now_s: float) -> None:
        self.changed.pop(group.group_id, None)
        self.short_valid.pop(group.group_id, None)
        group.row.closed_s = now_s
        self.closed.append(group)
        group.row.closed_seq = len(self.closed)

    def _take_order(self) -> int:
        self.next_order += 1
        return self.next_order - 1

    def _forget_samples(self, group: SampleGroup) -> None:
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

    # --- deadlines

    def due_s(self, group: SampleGroup, process_ended_s: float | None = None) -> float:
        """When the group is closed at the latest, in active seconds.

        Without a process that could still write, a group without samples waits no longer than one with some.
        """
        due = group.row.opened_s + self.settings.group_deadline_seconds
        last = group.row.last_sample_s
        if last is None:
            last = process_ended_s
        return due if last is None else min(due, last + self.settings.group_timeout_seconds)

    def schedule(self, group: SampleGroup) -> None:
        """See to it that ``overdue`` finds the group when its time has come."""
        heapq.heappush(self._due, (self.due_s(group), group.group_id))

    def is_any_due(self, now_s: float) -> bool:
        """Whether ``overdue`` has something to look at."""
        return bool(self._due) and self._due[0][0] <= now_s

    def overdue(self, now_s: float, process_ended_s: float | None = None) -> list[SampleGroup]:
        """The open groups whose deadline has passed."""
        found: dict[str, SampleGroup] = {}
        while self._due and self._due[0][0] <= now_s:
            key = heapq.heappop(self._due)[1]
            group = self.by_id[key]
            if group.state is not GroupState.OPEN or key in found:
                continue
            due = self.due_s(group, process_ended_s)
            if due <= now_s:
                found[key] = group
            else:
                heapq.heappush(self._due, (due, key))
        return list(found.values())

    def schedule_all(self, process_ended_s: float | None = None) -> None:
        """Compute every open group's deadline anew."""
        self._due = [(self.due_s(group, process_ended_s), group.group_id) for group in self.in_state(GroupState.OPEN)]
        heapq.heapify(self._due)

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
                row.num_samples, row.num_failed, row.num_forks, row.last_sample_s = 0, 0, 0, None
            elif row.state is GroupState.READY:
                self._ready.put(row.group_id, row.order)
            elif row.state is GroupState.DISCARDED:
                self.discard_reasons[row.reason] += 1
                if not row.is_reported:
                    self.unreported[row.group_id] = group
        self.closed = sorted((g for g in self.by_id.values() if g.row.closed_seq), key=lambda g: g.row.closed_seq)
        for group in takewhile(lambda group: group.state is GroupState.DISCARDED, reversed(self.closed)):
            self.fruitless.note(GroupState.OPEN, GroupState.DISCARDED, group.row.reason)

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


def _is_of_another(placement: Placement, rollout_id: str) -> bool:
    """Whether the slot of a fork has its main sample already, and that is of another rollout."""
    mains = (sample for sample in placement.group.samples if sample.slot == placement.slot and not sample.fork)
    return any(main.rollout_id != rollout_id for main in mains)
