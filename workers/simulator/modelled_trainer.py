"""Model of the buffer and the trainer: completes groups, trains on them, and announces new weights."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forebay.client.sample_writer.outbox import Sample
from forebay.core.ids import InstanceId, group_id
from forebay.core.weight_versions import AnnouncedWeights
from forebay.generators.buffer_link.abc import ClosedGroups, GroupKey, NoteFull, ProgressReport, Step, ignore

Trained = Callable[[str, tuple[int, ...], int], None]
"""Called for each group that is trained on, with its id, the numbers of its rollouts, and the step."""


@dataclass(frozen=True, slots=True)
class GroupClosing:
    """The buffer closes a group at ``at_s`` if it has begun and is not complete."""

    instance_id: InstanceId
    epoch: int
    at_s: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One training step."""

    number: int
    begun_s: float
    """When the trainer announced the previous weights, or began."""
    ready_s: float
    """When it had all its groups."""
    ended_s: float
    """When it announced new weights."""


class _BufferedGroup:
    __slots__ = ("key", "numbers", "slots")

    def __init__(self, key: GroupKey) -> None:
        self.key = key
        self.slots: set[int] = set()
        self.numbers: tuple[int, ...] = ()


class ModelledTrainer:
    """Replaces a ``Link``. Without ``groups_per_step`` it trains on each group as soon as the group is complete."""

    has_feed = True
    takes_failed = True

    def __init__(
        self, group_size: int, groups_per_step: int | None, train_s: float, num_steps: int | None, on_trained: Trained
    ) -> None:
        self.steps: list[SimulatedStep] = []
        self._group_size, self._groups_per_step = group_size, groups_per_step
        self._train_s, self._num_steps, self._on_trained = train_s, num_steps, on_trained
        self._time = asyncio.get_running_loop().time
        self._groups: dict[str, _BufferedGroup] = {}
        self._complete: deque[tuple[str, _BufferedGroup]] = deque()
        self._closed: list[str] = []
        self._closed_ids: set[str] = set()
        self._complete_ids: set[str] = set()
        self._opened_ids: set[str] = set()
        self._number = 0
        self._begun_s = 0.0
        self._is_over = False
        self._has_all = False
        self._read = asyncio.Event()
        self._news = asyncio.Event()

    def schedule(self, closings: Iterable[GroupClosing]) -> None:
        """Schedule closings of groups."""
        loop = asyncio.get_running_loop()
        for closing in closings:
            loop.call_at(closing.at_s, self._close, closing.instance_id, closing.epoch)

    def take(self, sample: Sample) -> None:
        """Accept a sample."""
        key = sample["group"]
        if key in self._closed_ids:
            return
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _BufferedGroup(sample["key"])
        if sample["slot"] in group.slots:
            raise ValueError(f"slot {sample['slot']} of group {key} is filled twice")
        group.slots.add(sample["slot"])
        group.numbers += (sample["number"],)
        if len(group.slots) == self._group_size:
            del self._groups[key]
            self._complete.append((key, group))
            self._complete_ids.add(key)
            self._read.set()

    def _close(self, instance_id: InstanceId, epoch: int) -> None:
        key = group_id(instance_id, epoch)
        if key in self._closed_ids or key in self._complete_ids or key not in self._opened_ids:
            return
        self._groups.pop(key, None)
        self._closed_ids.add(key)
        self._closed.append(key)
        self._news.set()

    # --- of a `Link`

    async def report(self, progress: ProgressReport, note_full: NoteFull = ignore) -> None:  # noqa: ARG002 - never full
        """Record opened groups. The last report means that no further sample follows."""
        self._opened_ids.update(group_id(*key) for key in progress.opened)
        if progress.is_last_slot_reported:
            self._has_all = True
            self._read.set()

    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:
        """Wait without limit for closed groups or a new step."""
        await self._news.wait()
        self._news.clear()
        closed, self._closed = self._closed, []
        step = Step(self._number, self._number, AnnouncedWeights(str(self._number), self._number, self._number))
        return ClosedGroups(
            group_ids=closed,
            last=before.last + len(closed),
            is_run_over=self._is_over,
            step=Step(step.number, step.weight_version, step.weights, discarded=closed) if closed else step,
            seen=before.seen + 1,
        )

    # --- of a trainer

    async def train(self) -> None:
        """Train step after step, until the run is over or has delivered all its groups."""
        while not self._is_over:
            wanted = self._groups_per_step or 1
            while len(self._complete) < wanted and not self._has_all:
                self._read.clear()
                await self._read.wait()
            if not self._complete:
                return
            await self._step([self._complete.popleft() for _ in range(min(wanted, len(self._complete)))])

    async def _step(self, groups: list[tuple[str, _BufferedGroup]]) -> None:
        ready_s = self._time()
        for key, group in groups:
            self._on_trained(key, group.numbers, self._number)
        if self._groups_per_step is None:
            return
        if self._train_s:
            await asyncio.sleep(self._train_s)
        self.steps.append(SimulatedStep(self._number, self._begun_s, ready_s, self._time()))
        self._number += 1
        self._begun_s = self._time()
        self._is_over = self._num_steps is not None and self._number >= self._num_steps
        self._news.set()
