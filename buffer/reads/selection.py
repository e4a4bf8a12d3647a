"""Chooses the groups of a batch: the request, the candidates, and when they are enough."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forebay.buffer.groups.sample_group import SampleGroup
from forebay.buffer.reads import staleness
from forebay.buffer.reads.judging import GroupJudge, JudgedGroup
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.group import DiscardReason, GroupState
from forebay.core.ids import InstanceId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A trainer's request. Without a size: everything that is ready, within the run's caps for legacy reads."""

    num_groups: int | None = None
    batch_size: int | None = None
    """Minimum number of rows after the hooks; groups are delivered whole."""
    is_slime: bool = False
    """Whether each group has exactly ``group_size`` rows, and sending the last byte acknowledges the batch."""
    lease_s: float = 600.0
    """Seconds until the lease expires; not used for slime's reads."""
    step: int | None = None
    """The training step that will use the batch."""
    max_staleness: int | None = None
    """Overrides the run's own bound."""
    request_id: str = ""
    """Repeating it while its batch is leased returns that batch."""

    @property
    def has_size(self) -> bool:
        return self.num_groups is not None or self.batch_size is not None


@dataclass(frozen=True, slots=True)
class ChosenGroup:
    """A group to deliver: ``staged`` is the part of ``whole``, its hooks' result, that is delivered."""

    group: SampleGroup
    staged: JudgedGroup
    whole: JudgedGroup
    is_stale: bool = False
    """Whether it exceeds the staleness bound but is delivered anyway."""

    @property
    def is_current(self) -> bool:
        """Whether it got no sample since its hooks were called."""
        return self.group.staged is self.whole


class Chooser:
    """Collects groups until a request is satisfied."""

    def __init__(self, buffer: RunBuffer, request: ReadRequest) -> None:
        self.request = request
        self.chosen: list[ChosenGroup] = []
        self._settings = buffer.run.settings
        self._num_rows = 0
        self._num_bytes = 0
        self._instances: set[InstanceId] = set()
        self._is_capped = False

    @property
    def is_satisfied(self) -> bool:
        if self.request.num_groups is not None:
            return len(self.chosen) >= self.request.num_groups
        if self.request.batch_size is not None:
            return self._num_rows >= self.request.batch_size
        return bool(self.chosen)

    @property
    def is_done(self) -> bool:
        return self._is_capped or (self.request.has_size and self.is_satisfied)

    def may_take(self, group: SampleGroup) -> bool:
        """Whether the group may be added. Without a size, one per instance: slime's client groups by instance id."""
        return self.request.has_size or group.instance_id not in self._instances

    def take(self, choice: ChosenGroup) -> None:
        """Add a group, unless this exceeds the caps of a read without a size."""
        if not self.request.has_size and self.chosen and self._is_over(choice.staged):
            self._is_capped = True
            return
        self.chosen.append(choice)
        self._num_rows += len(choice.staged.rows)
        self._num_bytes += 0 if self.request.has_size else choice.staged.num_bytes
        self._instances.add(choice.group.instance_id)

    def _is_over(self, staged: JudgedGroup) -> bool:
        limit = self._settings.legacy_read_max_groups
        if limit is not None and len(self.chosen) >= limit:
            return True
        return self._num_bytes + staged.num_bytes > self._settings.legacy_read_max_bytes


class Selection:
    """Finds groups of one run that satisfy a request. Its methods require the run's lock."""

    def __init__(self, buffer: RunBuffer, group_judge: GroupJudge) -> None:
        self._buffer = buffer
        self._group_judge = group_judge

    async def choose(self, request: ReadRequest, describe: Callable[[], Awaitable[bool]]) -> list[ChosenGroup]:
        """Groups that satisfy the request, none of which got a sample during the hooks' calls; otherwise none.

        ``describe`` is called once valid groups are found, before any other hook is called for them. It returns
        whether that took time, during which groups may have changed.
        """
        oldest = staleness.bound(self._buffer, request.max_staleness)
        while True:
            # Each turn starts over: while a hook ran for one group, others may have changed.
            await self._group_judge.evaluate()
            staleness.discard_stale(self._buffer, oldest)
            if not self._may_suffice(request):
                return []
            if self._is_any_valid() and await describe():
                continue
            chosen = await self._choose(request, oldest)
            # Nothing is awaited between this check and the lease of the groups.
            if all(choice.is_current for choice in chosen):
                self._note_cuts(chosen)
                return chosen
            self._buffer.groups.put_back(c.group for c in chosen if c.group.state is GroupState.READY)

    def _may_suffice(self, request: ReadRequest) -> bool:
        """Whether there may be enough groups to look closer: every sample wakes waiting readers."""
        groups, run = self._buffer.groups, self._buffer.run
        num_needed = request.num_groups or 1
        if request.is_slime and request.batch_size is not None:
            num_needed = -(-request.batch_size // run.settings.group_size)  # rounded up, however large it is
        return run.has_ended or groups.states[GroupState.READY] + len(groups.short_valid) >= num_needed

    def _is_any_valid(self) -> bool:
        return bool(self._buffer.groups.states[GroupState.READY] or self._buffer.groups.short_valid)

    async def _choose(self, request: ReadRequest, oldest: int | None) -> list[ChosenGroup]:
        """Groups that satisfy the request; empty if that is not possible."""
        chooser = Chooser(self._buffer, request)
        seen: list[SampleGroup] = []
        try:
            await self._consider_all(chooser, seen, oldest)
            if not chooser.is_satisfied:
                chooser.chosen.clear()
        except BaseException:  # includes a cancelled reader
            chooser.chosen.clear()
            raise
        finally:
            taken = {choice.group.group_id for choice in chooser.chosen}
            left = [group for group in seen if group.state is GroupState.READY and group.group_id not in taken]
            self._buffer.groups.put_back(left)
        return chooser.chosen

    async def _consider_all(self, chooser: Chooser, seen: list[SampleGroup], oldest: int | None) -> None:
        """Try full groups, oldest first, then incomplete valid ones. ``seen`` collects those taken from the queue."""
        for group in self._buffer.groups.take_ready():
            # It is no longer queued, and must be put back whatever happens to this read.
            seen.append(group)
            await self._consider(chooser, group, oldest)
            if chooser.is_done:
                return
        if not chooser.is_satisfied:
            for group in list(self._buffer.groups.short_valid.values()):
                await self._consider(chooser, group, oldest)
                if chooser.is_done:
                    return

    async def _consider(self, chooser: Chooser, group: SampleGroup, oldest: int | None) -> None:
        if not chooser.may_take(group):
            return
        is_stale = staleness.is_stale(group, oldest)
        if is_stale and self._buffer.run.settings.stale_groups == "discard":
            staleness.discard(self._buffer, group)
            return
        staged = await self._group_judge.stage(group)
        if staged is None:
            return
        if not chooser.request.is_slime:
            chooser.take(ChosenGroup(group, staged, staged, is_stale))
        elif self._fits_slime(group, staged):
            rows = staged.for_slime(self._buffer.run.settings.group_size)
            chooser.take(ChosenGroup(group, rows, staged, is_stale))

    def _fits_slime(self, group: SampleGroup, staged: JudgedGroup) -> bool:
        """Whether a group has enough rows; a closed one without is discarded. slime regroups by exact size."""
        size = self._buffer.run.settings.group_size
        if len(staged.rows) < size:
            if group.state is GroupState.READY:
                detail = f"{len(staged.rows)} of {size} rows were left"
                logger.info("group %s (%r) discarded as incomplete: %s", group.group_id, group.instance_id, detail)
                self._buffer.move(group, GroupState.DISCARDED, DiscardReason.INCOMPLETE, detail)
            return False
        return True

    def _note_cuts(self, chosen: Sequence[ChosenGroup]) -> None:
        for choice in chosen:
            num_cut = len(choice.whole.rows) - len(choice.staged.rows)
            if num_cut:
                self._buffer.counts["rows_cut"] += num_cut
                # slime has no place for forks, so cutting them is expected.
                level = logging.INFO if num_cut <= choice.group.row.num_forks else logging.WARNING
                logger.log(level, "group %s: %d surplus rows were cut", choice.group.group_id, num_cut)
