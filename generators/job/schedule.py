"""Which rollouts are to be run: every slot of every group, less what is skipped and what is there already."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from forebay.core.ids import InstanceId, group_id
from forebay.core.task_row import TaskRow
from forebay.generators.buffer_link.abc import GroupKey, Plan
from forebay.generators.rollouts.open_group import GroupPlan, rollout_numbers


class JobRows(Protocol):
    """The input: a ``RowFile``, or the rows of a simulation."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    def rows(self, epoch: int = 0) -> Iterator[TaskRow]:
        """One pass over them. Raises ``InputRefused``."""


class Schedule:
    """All groups of ``epochs``, one epoch after the other in the order of the file.

    ``skip_instance_ids`` is a multiset: an id listed k times skips the instance's first k epochs.
    """

    def __init__(self, rows: JobRows, epochs: range, plan: Plan, skip_instance_ids: Sequence[InstanceId]) -> None:
        self._rows = rows
        self._epochs = epochs
        self._plan = plan
        self._skips = Counter(skip_instance_ids)
        self.num_skipped = 0
        self.num_unknown = 0

    def groups(self) -> Iterator[GroupPlan]:
        """Every group that has a slot to fill. Reads the file as it goes; raises ``InputRefused``."""
        for epoch in self._epochs:
            for row in self._rows.rows(epoch):
                slots = self._missing_slots(row.instance_id, epoch)
                if slots:
                    numbers = rollout_numbers(self._plan, group_id(row.instance_id, epoch), slots)
                    yield GroupPlan(row, epoch, slots, numbers)
                else:
                    self.num_skipped += 1

    def chosen(self, keys: Sequence[GroupKey]) -> list[GroupPlan]:
        """Of these groups those that have a slot to fill, in this order. Reads the file once; raises ``InputRefused``.

        Those of instances that the file does not have are left out, and counted in ``num_unknown``.
        """
        wanted = {instance_id for instance_id, _ in keys}
        rows = {row.instance_id: row for row in self._rows.rows() if row.instance_id in wanted}
        self.num_unknown = sum(instance_id not in rows for instance_id, _ in keys)
        plans = []
        for instance_id, epoch in keys:
            row, slots = rows.get(instance_id), self._missing_slots(instance_id, epoch)
            if row is not None and slots:
                numbers = rollout_numbers(self._plan, group_id(instance_id, epoch), slots)
                plans.append(GroupPlan(row, epoch, slots, numbers))
        return plans

    def num_groups_total(self) -> int:
        """Groups that the run opens in all, those of earlier processes included. Reads the file once."""
        num_rows = self._rows.num_rows
        # With the epochs before these: earlier passes of the same generator were over them.
        skipped = sum(min(count, self._epochs.stop) for count in self._skips.values())
        return max(0, num_rows * self._epochs.stop - skipped)

    def _missing_slots(self, instance_id: InstanceId, epoch: int) -> tuple[int, ...]:
        key = (instance_id, epoch)
        # A group that was begun is filled up, although its instance may be skipped by now.
        there = self._plan.taken.get(key)
        if there is None and (key in self._plan.closed or epoch < self._skips[instance_id]):
            return ()
        return tuple(slot for slot in range(self._plan.group_size) if slot not in (there or ()))
