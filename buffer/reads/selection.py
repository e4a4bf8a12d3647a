"""Choosing the groups of a batch: who is asked about, in which order, and what of each goes out."""

import logging
from collections.abc import Sequence

from forebay.buffer.groups.groups import SampleGroup
from forebay.buffer.reads import staleness
from forebay.buffer.reads.judging import Pipeline, Staged
from forebay.buffer.reads.request import Chooser, ChosenGroup, ReadRequest
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.group import DiscardReason, GroupState

logger = logging.getLogger(__name__)


class Selection:
    """Looks for what satisfies a request among one run's groups. Called with the run's lock held."""

    def __init__(self, buffer: RunBuffer, pipeline: Pipeline) -> None:
        self._buffer = buffer
        self._pipeline = pipeline

    async def choose(self, request: ReadRequest) -> list[ChosenGroup]:
        """Groups that satisfy the request, none of which got a sample while others were asked about; or none at all."""
        oldest = staleness.bound(self._buffer, request)
        while True:
            await self._pipeline.evaluate()
            staleness.discard_stale(self._buffer, oldest)
            if not self._may_suffice(request):
                return []
            chosen = await self._choose(request, oldest)
            if all(choice.is_current for choice in chosen):
                self._note_cuts(chosen)
                return chosen
            self._buffer.groups.put_back(c.group for c in chosen if c.group.state is GroupState.READY)

    def _may_suffice(self, request: ReadRequest) -> bool:
        """Whether there are groups enough to look at them: a reader that waits is woken by every sample."""
        groups, run = self._buffer.groups, self._buffer.run
        num_needed = request.num_groups or 1
        if request.is_slime and request.batch_size is not None:
            num_needed = -(-request.batch_size // run.settings.group_size)  # rounded up, however large it is
        return run.has_ended or groups.states[GroupState.READY] + len(groups.short_valid) >= num_needed

    async def _choose(self, request: ReadRequest, oldest: int | None) -> list[ChosenGroup]:
        """Groups that satisfy the request; none at all if that is not possible."""
        chooser = Chooser(self._buffer, request)
        seen: list[SampleGroup] = []
        try:
            await self._consider_all(chooser, seen, oldest)
            if not chooser.is_satisfied:
                chooser.chosen.clear()
        except BaseException:  # also a reader that goes away
            chooser.chosen.clear()
            raise
        finally:
            taken = {choice.group.group_id for choice in chooser.chosen}
            left = [group for group in seen if group.state is GroupState.READY and group.group_id not in taken]
            self._buffer.groups.put_back(left)
        return chooser.chosen

    async def _consider_all(self, chooser: Chooser, seen: list[SampleGroup], oldest: int | None) -> None:
        """Full groups, oldest first, then short ones that are valid. ``seen`` gets those that left the queue."""
        for group in self._buffer.groups.take_ready():
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
        staged = await self._pipeline.stage(group)
        if staged is None:
            return
        if not chooser.request.is_slime:
            chooser.take(ChosenGroup(group, staged, staged, is_stale))
        elif self._fits_slime(group, staged):
            size = self._buffer.run.settings.group_size
            chooser.take(ChosenGroup(group, staged.first(size), staged, is_stale))

    def _fits_slime(self, group: SampleGroup, staged: Staged) -> bool:
        """Whether a group has rows enough; a closed one that has not is discarded. slime regroups by exact size."""
        size = self._buffer.run.settings.group_size
        if len(staged.rows) < size:
            if group.state is GroupState.READY:
                detail = f"{len(staged.rows)} rows were left of {size}"
                logger.warning("group %s (%r) discarded as incomplete: %s", group.group_id, group.instance_id, detail)
                self._buffer.move(group, GroupState.DISCARDED, DiscardReason.INCOMPLETE, detail)
            return False
        return True

    def _note_cuts(self, chosen: Sequence[ChosenGroup]) -> None:
        for choice in chosen:
            num_cut = len(choice.whole.rows) - len(choice.staged.rows)
            if num_cut:
                self._buffer.counts["rows_cut"] += num_cut
                # slime has no place for forks: that is no news.
                level = logging.INFO if num_cut <= choice.group.row.num_forks else logging.WARNING
                logger.log(level, "group %s: %d surplus rows were cut", choice.group.group_id, num_cut)
