"""Groups that are put off: a step takes those that are complete first, and the others get a long step of their own."""

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
    """One that has ended with samples, and what it adds to the counts: if they are used, or are thrown away."""

    samples: list[Sample]
    trace: RolloutTrace
    used: Mapping[str, int] = field(default_factory=dict)
    thrown: Mapping[str, int] = field(default_factory=dict)


class Deferral:
    """How many groups the present step begins, and which. Without ``leftover: "defer"`` as many as are asked for.

    A step is long if enough groups wait as it begins, or if no others are left: it has no spares, and no new groups.
    ``num_counted`` tells how many groups the step has. Samples are held back until their group is whole: where groups
    are put off, they are stored whole or not at all.
    """

    def __init__(self, plan: Plan, num_counted: Callable[[], int]) -> None:
        oversampling = plan.oversampling
        self._begun_per_step = oversampling.begun_per_step if oversampling is not None else None
        self._groups_per_step = plan.groups_per_step or 0
        self._num_counted = num_counted
        self._waiting: deque[OpenGroup] = deque()
        self._going: set[str] = set()
        """Ids of groups that this step has begun, and that are not complete."""
        self._held_back: dict[str, list[FinishedRollout]] = {}
        """By the ids of their groups."""
        self.is_long = False

    @property
    def is_on(self) -> bool:
        """Whether groups are put off at all."""
        return self._begun_per_step is not None

    @property
    def num_waiting(self) -> int:
        """Groups that were put off."""
        return len(self._waiting)

    def begin_step(self) -> None:
        """The run goes on after a hold."""
        self.is_long = len(self._waiting) >= self._groups_per_step

    def source(self, *, has_new: bool) -> Source | None:
        """Where the next group comes from that the step begins; None if it has begun enough."""
        if self._begun_per_step is None:
            return "new"
        is_long = self.is_long or not has_new
        target = self._groups_per_step if is_long else self._begun_per_step
        # What came to nothing is in neither number: another group takes its place.
        if self._num_counted() + len(self._going) >= target:
            return None
        # A long step whose groups come to nothing is filled up with new ones.
        return "deferred" if is_long and self._waiting else "new"

    def note_begun(self, group: str) -> None:
        """A group is begun in this step."""
        if self.is_on:
            self._going.add(group)

    def note_ended(self, group: str) -> None:
        """It is complete, or came to nothing."""
        self._going.discard(group)

    def put_off(self, group: OpenGroup) -> None:
        """A group begins afresh, in a later step."""
        self._going.discard(group.group_id)
        self._waiting.append(group)

    def take(self) -> OpenGroup | None:
        """The group that has waited longest; those that were closed meanwhile are forgotten."""
        while self._waiting:
            group = self._waiting.popleft()
            if not group.is_finished:
                return group
        return None

    def waits(self, group: OpenGroup) -> bool:
        """Whether it was put off."""
        return group in self._waiting

    # --- samples that wait for the rest of their group

    def hold_back(self, group: str, rollout: FinishedRollout) -> None:
        """Its samples wait from now on."""
        self._held_back.setdefault(group, []).append(rollout)

    def take_held_back(self, group: str) -> list[FinishedRollout]:
        """Those of a group that is whole."""
        return self._held_back.pop(group, [])

    def throw_away(self, group: str) -> list[FinishedRollout]:
        """Those of a group that will not be whole: they are of no use to anybody."""
        thrown = self.take_held_back(group)
        for rollout in thrown:
            rollout.trace.ending = "aborted"
            rollout.trace.end()
        return thrown
