"""The groups of a job: which to run, and their submission to the policy, a few ahead and in file order."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from forebay.core.errors import InputRefused
from forebay.core.ids import InstanceId, group_id
from forebay.core.scheduling.policy import Policy, WaitingGroup
from forebay.core.task_row import TaskRow
from forebay.generators.buffer_link.abc import GroupKey, Plan
from forebay.generators.job.deferral import Deferral
from forebay.generators.rollouts.open_group import GroupPlan, rollout_numbers


class JobRows(Protocol):
    """The input of a job: a ``RowFile`` or simulated rows."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def rows(self, epoch: int = 0) -> Iterator[TaskRow]:
        """Pass over the rows once. Raises ``InputRefused``."""


class Schedule:
    """All groups of ``epochs`` with unfilled slots, epoch by epoch in file order.

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
        """Yield every group with a slot to fill, reading the file lazily. Raises ``InputRefused``."""
        for epoch in self._epochs:
            for row in self._rows.rows(epoch):
                slots = self._missing_slots(row.instance_id, epoch)
                if slots:
                    numbers = rollout_numbers(self._plan, group_id(row.instance_id, epoch), slots)
                    yield GroupPlan(row, epoch, slots, numbers)
                else:
                    self.num_skipped += 1

    def chosen(self, keys: Sequence[GroupKey]) -> list[GroupPlan]:
        """Return those of the given groups that have a slot to fill, in the given order. Raises ``InputRefused``.

        Reads the file once. Groups whose instance is not in the file are left out and counted in ``num_unknown``.
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
        """Total number of groups of the run, including those opened by earlier processes. Reads the file once."""
        num_rows = self._rows.num_rows
        # Includes earlier epochs, which earlier passes of the same generator covered.
        skipped = sum(min(count, self._epochs.stop) for count in self._skips.values())
        return max(0, num_rows * self._epochs.stop - skipped)

    def _missing_slots(self, instance_id: InstanceId, epoch: int) -> tuple[int, ...]:
        key = (instance_id, epoch)
        # A group that has begun is completed even if its instance is now listed to be skipped.
        there = self._plan.taken.get(key)
        if there is None and (key in self._plan.closed or epoch < self._skips[instance_id]):
            return ()
        return tuple(slot for slot in range(self._plan.group_size) if slot not in (there or ()))


class GroupSource(Protocol):
    """Source of a job's groups."""

    @property
    def is_over(self) -> bool:
        """Whether no groups are left and no more follow."""

    @property
    def is_pending(self) -> bool:
        """Whether no group is available now but more may follow."""

    @property
    def error(self) -> InputRefused | None:
        """The input error that ended the groups early, if any."""

    def take(self) -> GroupPlan | None:
        """Remove and return the next group; None if there is none."""

    def drop(self, group_id: str) -> None:
        """Drop a group that the buffer has closed."""


class ScheduledGroups:
    """A ``GroupSource`` of all groups of a schedule."""

    is_pending = False

    def __init__(self, groups: Iterator[GroupPlan]) -> None:
        self._groups = groups
        self.is_over = False
        self.error: InputRefused | None = None

    def take(self) -> GroupPlan | None:
        """Return the next group, reading the input file lazily."""
        planned = None
        try:
            planned = next(self._groups, None)
        except InputRefused as error:
            # Groups read before the error are still filled and written.
            self.error = error
        self.is_over = planned is None
        return planned

    def drop(self, group_id: str) -> None:
        """Do nothing: the buffer closes the group again when it is announced."""


class GroupFeed:
    """Submits the groups of a source to a policy, and keeps those that have not begun.

    ``deferral`` decides how many groups a step begins, and whether deferred groups come first.
    """

    def __init__(self, groups: GroupSource, policy: Policy, plan: Plan, deferral: Deferral) -> None:
        self._groups, self._policy, self._plan, self._deferral = groups, policy, plan, deferral
        self._waiting: dict[str, GroupPlan] = {}
        self._returned: deque[GroupPlan] = deque()
        self._is_over = False

    @property
    def error(self) -> InputRefused | None:
        """The input error that ended the groups early, if any."""
        return self._groups.error

    @property
    def is_empty(self) -> bool:
        """Whether every group has begun and no more follow."""
        return (self._is_over or self._groups.is_over) and not self._waiting and not self._returned

    @property
    def is_expecting(self) -> bool:
        """Whether no group can begin now but more may follow."""
        return self._groups.is_pending and not self._waiting and not self._returned

    def refill(self) -> None:
        """Submit as many groups as the policy has room for and the step may begin."""
        while self._policy.room() > 0 and (source := self._deferral.source(has_new=not self._is_over)):
            if source == "deferred":
                if (group := self._deferral.take()) is not None:
                    self._deferral.note_begun(group.group_id)
                    self.submit(group.plan, is_open=True)
            elif self._is_over or (planned := self._next()) is None:
                if not self._is_over and self._groups.is_pending:
                    return
                self._is_over = True
                if not self._deferral.num_waiting:
                    return
            else:
                self._waiting[planned.group_id] = planned
                self._deferral.note_begun(planned.group_id)
                self.submit(planned)

    def _next(self) -> GroupPlan | None:
        return self._returned.popleft() if self._returned else self._groups.take()

    def withdraw(self) -> None:
        """Take back groups that have not begun, so that the next step can decide again."""
        for key in self._waiting:
            self._policy.closed(key)
            self._deferral.note_ended(key)
        self._returned.extendleft(reversed(self._waiting.values()))
        self._waiting.clear()
        self._is_over = self._is_over and not self._returned

    def submit(self, planned: GroupPlan, *, is_open: bool = False) -> None:
        """Submit a group. With ``is_open``, it has begun before, and new rollouts replace discarded ones."""
        taken = set(range(self._plan.group_size)) - set(planned.slots)
        self._policy.submit(
            WaitingGroup(
                group=planned.group_id,
                instance_id=planned.row.instance_id,
                epoch=planned.epoch,
                numbers=planned.numbers,
                num_needed=len(planned.slots),
                num_chars=planned.num_chars,
                taken=tuple(sorted(taken)),
                is_open=is_open,
            )
        )

    def begin(self, group: str) -> GroupPlan | None:
        """Remove and return a group that begins now; None if it has begun before."""
        return self._waiting.pop(group, None)

    def drop(self, group: str) -> None:
        """Drop a group that the buffer closed before it began."""
        self._groups.drop(group)
        if self._waiting.pop(group, None) is not None:
            self._policy.closed(group)
            self._deferral.note_ended(group)
