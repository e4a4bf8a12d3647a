"""Which rollouts are to be run: every slot of every group, less what is skipped and what is there already."""

from collections import Counter
from collections.abc import Iterator, Sequence

from forebay.core.ids import InstanceId, group_id
from forebay.generators.buffer_link.abc import Plan
from forebay.generators.job.parts import JobRows
from forebay.generators.rollouts.open_group import GroupPlan, rollout_numbers


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
