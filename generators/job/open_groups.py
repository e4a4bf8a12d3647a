"""The groups that a job is filling: what ends them, what becomes of them between steps, and what rollouts cost."""

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
    """By id. ``services`` runs what goes on beside the rollouts; it is to be set before anything is ended.

    ``on_end`` is told of each group that is ended before its last rollout has.
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
        """From now on this is the group of its id."""
        self._groups[group.group_id] = group
        group.on_change = self._reporter.note_group
        self._reporter.note_group(group)

    def remove(self, group: OpenGroup) -> bool:
        """It has ended; whether it was the group of its id still."""
        # Another one has its id where the rollouts of a step were thrown away.
        if self._groups.get(group.group_id) is not group:
            return False
        del self._groups[group.group_id]
        return True

    def get(self, group_id: str) -> OpenGroup | None:
        """The group of this id, unless it has ended."""
        group = self._groups.get(group_id)
        return None if group is None or group.is_finished else group

    def unfinished(self) -> Iterator[OpenGroup]:
        """The groups that still need rollouts."""
        return (group for group in list(self._groups.values()) if not group.is_finished and not group.is_complete)

    # --- groups

    def close_id(self, group_id: str) -> None:
        """``close`` for the group with this id, if there is one."""
        if (group := self._groups.get(group_id)) is not None:
            self.close(group)

    def close(self, group: OpenGroup) -> None:
        """Nothing that is generated for it would be used: cancel its rollouts, and abort their calls."""
        if group.is_finished:
            return
        self._reporter.totals.num_groups_closed += 1
        calls = group.calls()  # before it is closed: tasks that are cancelled forget their calls
        group.close()
        self._on_end(group)
        self.services.create_task(self._pool.abort(group.rid_prefix, calls))

    def close_incomplete(self, group: OpenGroup) -> None:
        """No other rollout can be started for it: it is closed with the samples that it has."""
        self.close(group)
        self.services.create_task(self._reporter.announce_incomplete(group.key))

    def end_rest(self, group: OpenGroup) -> None:
        """End the rollouts of a group that needs them no more, their calls first: so it is known what they sampled."""

        async def end() -> None:
            await self._pool.stop(group.calls)
            group.close()
            if self._hold.is_held:  # nothing else is going on that would be reported
                self._reporter.flush()

        # Shut now, so that no other call goes out; closed once it is known from the engines what its calls sampled.
        group.shut()
        self._on_end(group)
        self.services.create_task(end())

    # --- all of them

    def keep_rest(self) -> None:
        """End the calls in flight: the turns go on with others, which wait until the run is no longer held."""

        async def end() -> None:
            await self._pool.stop(self._calls_between_steps, limit_s=None)
            rollouts = [attempts for group in self._groups.values() for attempts in group.rollouts.values()]
            self._reporter.count(kept_costs(rollouts))
            self._reporter.flush()

        self.services.create_task(end())

    def _calls_between_steps(self) -> list[Call]:
        # Not streams: their readers have seen the beginning, and nobody could go on with them.
        groups = self._groups.values() if self._hold.is_held else ()
        return [call for group in groups for call in group.whole_calls()]

    async def stop(self, run_id: str) -> None:
        """The run is over: close all groups, and abort every call of the run."""
        calls = [call for group in self._groups.values() for call in group.calls()]
        self.close_all()
        await self._pool.abort(run_rid_prefix(run_id), calls)

    def close_all(self) -> None:
        """What still runs in threads ends with its next call."""
        for group in self._groups.values():
            group.close()


def cost(attempts: Sequence[Execution], ending: Ending) -> Counter[str]:
    """What one rollout adds to the counts. Attempts before the last one failed; one that never began costs nothing."""
    if not attempts:
        return Counter()
    *before, last = attempts
    counts = Counter({f"rollouts_{ending}": 1, f"tokens_{ending}": last.num_sampled_tokens})
    counts["tokens_failed"] += sum(attempt.num_sampled_tokens for attempt in before)
    if ending == "finished":
        counts.update({f"capture_{name}": number for name, number in last.trajectory.counters.items()})
    return counts


def kept_costs(rollouts: Iterable[Sequence[Execution]]) -> Counter[str]:
    """What is kept of rollouts in flight until the next step; those that sampled nothing yet do not count."""
    tokens = [attempts[-1].num_sampled_tokens for attempts in rollouts if attempts]
    return Counter(rollouts_held=sum(1 for number in tokens if number), tokens_held=sum(tokens))
