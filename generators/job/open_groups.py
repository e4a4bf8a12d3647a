"""The groups that a job is filling: how they end, what happens to them between steps, and the cost of rollouts."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from forebay.core.ids import run_rid_prefix
from forebay.engines.pool import Call
from forebay.generators.job.ports import JobEngines
from forebay.generators.job.reporter import Reporter
from forebay.generators.rollouts.open_group import Execution, OpenGroup, StepBarrier
from forebay.generators.rollouts.rollout_trace import Ending


class OpenGroups:
    """Open groups by id. ``services`` runs background tasks and must be set before any group is ended.

    ``on_end`` is called with each group that ends before its last rollout.
    """

    services: asyncio.TaskGroup

    def __init__(
        self, pool: JobEngines, reporter: Reporter, hold: StepBarrier, on_end: Callable[[OpenGroup], None]
    ) -> None:
        self._pool = pool
        self._reporter = reporter
        self._hold = hold
        self._on_end = on_end
        self._groups: dict[str, OpenGroup] = {}

    def add(self, group: OpenGroup) -> None:
        """Add a group, replacing the previous group with its id."""
        self._groups[group.group_id] = group
        group.on_change = self._reporter.note_group
        self._reporter.note_group(group)

    def remove(self, group: OpenGroup) -> bool:
        """Remove a group. Returns False if another group has replaced it."""
        # When the rollouts of a step are discarded, a new group takes over the id.
        if self._groups.get(group.group_id) is not group:
            return False
        del self._groups[group.group_id]
        return True

    def get(self, group_id: str) -> OpenGroup | None:
        """Return the group with this id, unless it has ended."""
        group = self._groups.get(group_id)
        return None if group is None or group.is_finished else group

    def unfinished(self) -> Iterator[OpenGroup]:
        """Iterate over the groups that still need rollouts."""
        return (group for group in list(self._groups.values()) if not group.is_finished and not group.is_complete)

    # --- groups

    def close_id(self, group_id: str) -> None:
        """Close the group with this id, if there is one."""
        if (group := self._groups.get(group_id)) is not None:
            self.close(group)

    def close(self, group: OpenGroup) -> None:
        """Close a group: cancel its rollouts and abort their calls."""
        if group.is_finished:
            return
        self._reporter.totals.num_groups_closed += 1
        calls = group.calls()  # read first: cancelled tasks drop their calls
        group.close()
        self._on_end(group)
        self.services.create_task(self._pool.abort(group.rid_prefix, calls))

    def close_incomplete(self, group: OpenGroup) -> None:
        """Close a group that can get no more rollouts, keeping the samples it has."""
        self.close(group)
        self.services.create_task(self._reporter.announce_incomplete(group.key))

    def end_rest(self, group: OpenGroup) -> None:
        """End rollouts that a group no longer needs. Their calls end first, so that the sampled tokens are known."""

        async def end() -> None:
            await self._pool.stop(group.calls)
            group.close()
            if self._hold.is_held:  # no other report is due while the run is paused
                self._reporter.flush()

        # Shut now, so that no other call is sent; closed once the engines have returned the sampled tokens.
        group.shut()
        self._on_end(group)
        self.services.create_task(end())

    # --- all of them

    def keep_rest(self) -> None:
        """End the calls in flight. Their turns continue with new calls once the run resumes."""

        async def end() -> None:
            await self._pool.stop(self._calls_between_steps, limit_s=None)
            rollouts = [attempts for group in self._groups.values() for attempts in group.rollouts.values()]
            self._reporter.count(kept_costs(rollouts))
            self._reporter.flush()

        self.services.create_task(end())

    def _calls_between_steps(self) -> list[Call]:
        # Not streams: their readers have seen the beginning, so they cannot be continued.
        groups = self._groups.values() if self._hold.is_held else ()
        return [call for group in groups for call in group.whole_calls()]

    async def stop(self, run_id: str) -> None:
        """Close all groups and abort every call of the run."""
        calls = [call for group in self._groups.values() for call in group.calls()]
        self.close_all()
        await self._pool.abort(run_rid_prefix(run_id), calls)

    def close_all(self) -> None:
        """Close all groups. Rollouts in threads end with their next call."""
        for group in self._groups.values():
            group.close()


def cost(attempts: Sequence[Execution], ending: Ending) -> Counter[str]:
    """Return what one rollout adds to the counts. All attempts but the last count as failed."""
    if not attempts:
        return Counter()
    *before, last = attempts
    counts = Counter({f"rollouts_{ending}": 1, f"tokens_{ending}": last.num_sampled_tokens})
    counts["tokens_failed"] += sum(attempt.num_sampled_tokens for attempt in before)
    if ending == "finished":
        counts.update({f"capture_{name}": number for name, number in last.trajectory.counters.items()})
    return counts


def kept_costs(rollouts: Iterable[Sequence[Execution]]) -> Counter[str]:
    """Return counts of the rollouts kept for the next step; those without sampled tokens do not count."""
    tokens = [attempts[-1].num_sampled_tokens for attempts in rollouts if attempts]
    return Counter(rollouts_held=sum(1 for number in tokens if number), tokens_held=sum(tokens))
