"""Which rollouts are to be run: every slot of every group, less what is skipped and what is there already."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import TYPE_CHECKING

from forebay.core.ids import InstanceId, group_id, rollout_uid
from forebay.core.task_row import TaskRow
from forebay.generators.job.input_rows import RowFile
from forebay.generators.job.step_gate import Step

if TYPE_CHECKING:  # pydantic takes a moment to import, and each inspected generator file would wait for it
    from forebay.core.oversampling import Oversampling

GroupKey = tuple[InstanceId, int]
"""Instance and epoch."""


@dataclass(frozen=True)
class Plan:
    """What a run process is to do, as the server tells it. Durations in seconds."""

    run_id: str
    group_size: int
    group_timeout_s: float = 300.0
    group_deadline_s: float = 3_600.0
    closed: frozenset[GroupKey] = frozenset()
    """Groups for which nothing is to be generated."""
    taken: Mapping[GroupKey, frozenset[int]] = field(default_factory=dict)
    """Incomplete groups, with the slots that are there."""
    uids: frozenset[str] = frozenset()
    """Of the samples there, the uids that are not those of their slots."""
    is_resumed: bool = False
    last_closed: int = 0
    """The number in the feed of the last group that was closed."""
    oversampling: "Oversampling | None" = None
    step: Step | None = None
    """Where the trainer is."""
    captures: bool = True
    """Whether the engines are asked for tokens."""

    @property
    def groups_per_step(self) -> int | None:
        return self.oversampling.groups_per_step if self.oversampling else None

    @property
    def num_spares(self) -> int:
        """Rollouts of a group beyond its slots."""
        return self.oversampling.num_spares(self.group_size) if self.oversampling else 0


@dataclass(frozen=True)
class GroupPlan:
    """One group to open, the slots of it that are missing, and the numbers of the rollouts that are to fill them."""

    row: TaskRow
    epoch: int
    slots: tuple[int, ...]
    numbers: tuple[int, ...]


def rollout_numbers(plan: Plan, group: str, slots: Sequence[int], first: int = 0) -> tuple[int, ...]:
    """Numbers, from ``first`` on, for the rollouts that are to fill ``slots``, spares included.

    A slot's own number comes first. Each stands for a uid, and none is used twice.
    """
    beyond = count(max(first, plan.group_size))
    candidates = chain((slot for slot in slots if slot >= first), beyond)
    free = (number for number in candidates if rollout_uid(plan.run_id, group, number) not in plan.uids)
    return tuple(islice(free, len(slots) + plan.num_spares))


class Schedule:
    """All groups of a run, epoch by epoch in the order of the file.

    ``skip_instance_ids`` is a multiset: an id listed k times skips the instance's first k epochs.
    """

    def __init__(self, rows: RowFile, num_epochs: int, plan: Plan, skip_instance_ids: Sequence[InstanceId]) -> None:
        self._rows = rows
        self._num_epochs = num_epochs
        self._plan = plan
        self._skips = Counter(skip_instance_ids)
        self.num_skipped = 0

    def groups(self) -> Iterator[GroupPlan]:
        """Every group that has a slot to fill. Reads the file as it goes; raises ``InputRefused``."""
        for epoch in range(self._num_epochs):
            for row in self._rows.rows(epoch):
                slots = self._missing_slots(row.instance_id, epoch)
                if slots:
                    numbers = rollout_numbers(self._plan, group_id(row.instance_id, epoch), slots)
                    yield GroupPlan(row, epoch, slots, numbers)
                else:
                    self.num_skipped += 1

    def num_groups_total(self) -> int:
        """Groups that the run opens in all, those of earlier processes included. Reads the file once."""
        num_rows = self._rows.num_rows
        skipped = sum(min(count, self._num_epochs) for count in self._skips.values())
        return max(0, num_rows * self._num_epochs - skipped)

    def _missing_slots(self, instance_id: InstanceId, epoch: int) -> tuple[int, ...]:
        key = (instance_id, epoch)
        there = self._plan.taken.get(key)
        if there is None and (key in self._plan.closed or epoch < self._skips[instance_id]):
            return ()
        return tuple(slot for slot in range(self._plan.group_size) if slot not in (there or ()))
