"""The groups that a run process is filling, and how what is not needed any more is ended."""

import asyncio
from collections.abc import Iterator

from forebay.core.ids import run_rid_prefix
from forebay.engines.ring import Call, EngineRing
from forebay.generators.job.reporter import Reporter, held
from forebay.generators.rollouts.open_group import OpenGroup
from forebay.generators.rollouts.step_gate import Hold


class OpenGroups:
    """By id. ``services`` runs what goes on beside the rollouts; it is to be set before anything is ended."""

    services: asyncio.TaskGroup

    def __init__(self, ring: EngineRing, reporter: Reporter, hold: Hold) -> None:
        self._ring = ring
        self._reporter = reporter
        self._hold = hold
        self._groups: dict[str, OpenGroup] = {}

    def add(self, group: OpenGroup) -> None:
        """From now on this is the group of its id."""
        self._groups[group.group_id] = group

    def remove(self, group: OpenGroup) -> None:
        """It has ended; another one that took its id stays."""
        if self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]

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
        calls = group.calls()
        group.close()
        self.services.create_task(self._ring.abort(group.rid_prefix, calls))

    def end_rest(self, group: OpenGroup) -> None:
        """End the rollouts of a group that needs them no more, their calls first: so it is known what they sampled."""

        async def end() -> None:
            await self._ring.stop(group.calls)
            group.close()
            if self._hold.is_held:  # nothing else is going on that would be reported
                self._reporter.flush()

        group.shut()
        self.services.create_task(end())

    # --- all of them

    def keep_rest(self) -> None:
        """End the calls in flight: the turns go on with others, which wait until the run is no longer held."""

        async def end() -> None:
            await self._ring.stop(self._held_calls, limit_s=None)
            rollouts = [attempts for group in self._groups.values() for attempts in group.rollouts.values()]
            self._reporter.count(held(rollouts))
            self._reporter.flush()

        self.services.create_task(end())

    def _held_calls(self) -> list[Call]:
        """Not streams: their readers have seen the beginning, and nobody could go on with them."""
        groups = self._groups.values() if self._hold.is_held else ()
        return [call for group in groups for call in group.whole_calls()]

    async def stop(self, run_id: str) -> None:
        """The run is over: close all groups, and abort every call of the run."""
        calls = [call for group in self._groups.values() for call in group.calls()]
        self.close_all()
        await self._ring.abort(run_rid_prefix(run_id), calls)

    def close_all(self) -> None:
        """What still runs in threads ends with its next call."""
        for group in self._groups.values():
            group.close()
