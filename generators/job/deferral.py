"""Deferred groups: a step uses the groups that complete first; the others later get a long step of their own."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from forebay.client.sample_writer.outbox import Sample
from forebay.generators.buffer_link.abc import Plan
from forebay.generators.rollouts.open_group import OpenGroup
from forebay.generators.rollouts.rollout_trace import RolloutTrace

Source = Literal["new", "deferred"]


@dataclass
class FinishedRollout:
    """A rollout that ended with samples, and what it adds to the counts if they are ``used`` or ``thrown`` away."""

    samples: list[Sample]
    trace: RolloutTrace
    used: Mapping[str, int] = field(default_factory=dict)
    thrown: Mapping[str, int] = field(default_factory=dict)


class Deferral:
    """Decides how many and which groups the current step begins; only limits them with ``leftover: "defer"``.

    A step is long if enough deferred groups wait when it begins, or if no new groups are left. A long step has no
    spares, and begins new groups only to replace discarded ones. ``num_counted`` returns how many groups the step has.
    Deferred groups are stored completely or not at all, so samples are held back until their group is complete.
    """

    def __init__(self, plan: Plan, num_counted: Callable[[], int]) -> None:
        oversampling = plan.oversampling
        self._begun_per_step = oversampling.begun_per_step if oversampling is not None else None
        self._groups_per_step = plan.groups_per_step or 0
        self._num_counted = num_counted
        self._waiting: deque[OpenGroup] = deque()
        self._going: set[str] = set()
        """Ids of incomplete groups that this step has begun."""
        self._held_back: dict[str, list[FinishedRollout]] = {}
        """Finished rollouts by group id."""
        self.is_long = False

    @property
    def is_on(self) -> bool:
        """Whether groups are deferred at all."""
        return self._begun_per_step is not None

    @property
    def num_waiting(self) -> int:
        """Number of deferred groups."""
        return len(self._waiting)

    def begin_step(self) -> None:
        """Begin a step after the run was paused."""
        self.is_long = len(self._waiting) >= self._groups_per_step

    def source(self, *, has_new: bool) -> Source | None:
        """Source of the next group to begin in this step; None if it has begun enough."""
        if self._begun_per_step is None:
            return "new"
        is_long = self.is_long or not has_new
        target = self._groups_per_step if is_long else self._begun_per_step
        # Discarded groups are in neither number: other groups replace them.
        if self._num_counted() + len(self._going) >= target:
            return None
        # A long step whose groups are discarded is filled with new ones.
        return "deferred" if is_long and self._waiting else "new"

    def note_begun(self, group: str) -> None:
        """Note a group begun in this step."""
        if self.is_on:
            self._going.add(group)

    def note_ended(self, group: str) -> None:
        """Note that a group is complete or discarded."""
        self._going.discard(group)

    def put_off(self, group: OpenGroup) -> None:
        """Defer a group, which restarts in a later step."""
        self._going.discard(group.group_id)
        self._waiting.append(group)

    def take(self) -> OpenGroup | None:
        """Return the group that has waited longest, skipping closed groups."""
        while self._waiting:
            group = self._waiting.popleft()
            if not group.is_finished:
                return group
        return None

    def waits(self, group: OpenGroup) -> bool:
        """Whether a group is deferred."""
        return group in self._waiting

    # --- samples that wait for the rest of their group

    def hold_back(self, group: str, rollout: FinishedRollout) -> None:
        """Hold back the samples of a rollout until its group is complete."""
        self._held_back.setdefault(group, []).append(rollout)

    def take_held_back(self, group: str) -> list[FinishedRollout]:
        """Remove and return the rollouts of a complete group."""
        return self._held_back.pop(group, [])

    def throw_away(self, group: str) -> list[FinishedRollout]:
        """Remove and return the rollouts of a group that will not be completed, ending their traces as aborted."""
        thrown = self.take_held_back(group)
        for rollout in thrown:
            rollout.trace.ending = "aborted"
            rollout.trace.end()
        return thrown
