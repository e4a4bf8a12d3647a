"""One pass of a run process over its schedule: the rollouts, and the tasks that serve them."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.clock import ActiveClock
from forebay.core.errors import InputRefused
from forebay.core.ids import run_rid_prefix
from forebay.engines.ring import Call, EngineRing
from forebay.generators.buffer_link.abc import ClosedGroups, Link, Plan, RunGone, Step
from forebay.generators.job.reporter import Ending, Reporter, Totals, cost, kept_costs
from forebay.generators.job.schedule import Schedule
from forebay.generators.rollouts.attempts import RolloutRunner
from forebay.generators.rollouts.open_group import GroupClosed, GroupPlan, Hold, OpenGroup

logger = logging.getLogger(__name__)

NOTHING_SEEN = -1


@dataclass(frozen=True)
class JobParts:
    """What a job works with; all of it is open already, and closed by whoever opened it."""

    plan: Plan
    schedule: Schedule
    link: Link
    ring: EngineRing
    runner: RolloutRunner
    writer: AsyncWriter
    reporter: Reporter
    clock: ActiveClock
    hold: Hold
    num_concurrent: int


class RolloutJob:
    """Fills the groups of a schedule, ``num_concurrent`` rollouts at a time."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._reporter = parts.reporter
        self._hold = parts.hold
        self._open = OpenGroups(parts.ring, parts.reporter, parts.hold)
        self._places = asyncio.Semaphore(parts.num_concurrent)
        self._rollouts: asyncio.TaskGroup
        self._input_error: InputRefused | None = None

    async def run(self) -> Totals:
        """Run to the end of the schedule, or until the run is gone.

        Raises ``InputRefused`` for a row that cannot be used, after everything before it was written.
        """
        try:
            await self._serve()
        except BaseExceptionGroup as failures:  # one cause is raised, not the group
            first = next(_leaves(failures))
            if not isinstance(first, RunGone):
                raise first from None
            logger.info("stopping: %s", first)
            self._reporter.totals.is_stopped = True
            await self._open.stop(self._parts.plan.run_id)
        finally:
            # Threads cannot be cancelled: the next call of each raises, as its group is closed.
            self._open.close_all()
        if self._input_error is not None:
            raise self._input_error
        return self._reporter.totals

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as services:
            self._open.services = services
            news = services.create_task(self._reporter.run())
            feed = services.create_task(self._follow_closed())
            # Its error ends the rollouts as well: what they would bring could not be written.
            services.create_task(self._parts.writer.watch())
            # Left only when no rollout can bring a sample any more: then the writer may be closed.
            async with asyncio.TaskGroup() as rollouts:
                self._rollouts = rollouts
                self._hold.on_change = self._note_held
                self._note_step(self._parts.plan.step)
                await self._fill()
            await self._parts.writer.close()
            # The report lets the run end, and the feed of an ended run says that it is gone.
            feed.cancel()
            await self._reporter.finish()
            news.cancel()

    async def _fill(self) -> None:
        try:
            for planned in self._parts.schedule.groups():
                await self._start_group(planned)
        except InputRefused as error:
            # The rollouts in progress go on to their end, and what they bring is written.
            self._input_error = error

    # --- groups

    async def _start_group(self, planned: GroupPlan) -> None:
        # The place first: the time of a group that is announced runs, and would run out waiting for one.
        await self._take_place()
        await self._reporter.announce((planned.row.instance_id, planned.epoch))
        group = OpenGroup(self._parts.plan, planned, self._parts.clock, self._hold)
        self._add(group)
        await self._start_rollouts(group, num_places=1)

    def _add(self, group: OpenGroup) -> None:
        self._open.add(group)
        self._rollouts.create_task(self._expire(group))

    async def _start_rollouts(self, group: OpenGroup, num_places: int = 0) -> None:
        """Start them one by one; ``num_places`` are taken already."""
        for position, number in enumerate(group.numbers):
            if position >= num_places:
                await self._take_place()
            if group.is_closed:  # while a place was waited for
                self._places.release()
                return
            self._rollouts.create_task(self._run_rollout(group, number))

    async def _take_place(self) -> None:
        """A place for another rollout; none while the run is held."""
        await self._places.acquire()
        while self._hold.is_held:
            self._places.release()
            await self._hold.wait()
            await self._places.acquire()

    async def _expire(self, group: OpenGroup) -> None:
        """Close the group at its deadline."""
        # The server counts the same time and mostly says so before; slime's buffer never does.
        if await group.wait_expired():
            logger.warning("group %s of instance %r took too long", group.group_id, group.key[0])
            self._open.close(group)
        self._open.remove(group)

    async def _follow_closed(self) -> None:
        """Close the groups that the buffer closed. Raises ``RunGone`` when the run was stopped."""
        plan, link = self._parts.plan, self._parts.link
        news = ClosedGroups(last=plan.last_closed, seen=NOTHING_SEEN)
        while link.has_feed:
            news = await link.closed_groups(news)
            for group_id in news.group_ids:
                self._open.close_id(group_id)
            self._note_step(news.step)
            self._hold.note_paused(news.is_paused)
            self._reporter.note_paused(news.is_paused)
            if news.is_run_over:
                raise RunGone("the run was stopped")

    # --- rollouts

    async def _run_rollout(self, group: OpenGroup, number: int) -> None:
        try:
            for sample in await self._samples(group, number):
                await self._parts.writer.write(sample)
        finally:
            self._places.release()

    async def _samples(self, group: OpenGroup, number: int) -> list[Sample]:
        """The rollout's samples, if its group needs them."""
        task = asyncio.current_task()
        assert task is not None
        ending: Ending = "aborted"
        try:
            with group.working():
                samples = await self._parts.runner.samples(group, number)
                await self._hold.wait()  # it could fill another group than the step needs
            is_failed = samples[-1]["status"] == "failed"
            slot = group.admit(number, is_failed=is_failed)
            if slot is None:
                ending = "failed" if is_failed else "aborted"
                return []
            ending = "failed" if is_failed else "finished"
            return self._admitted(group, slot, samples)
        except GroupClosed:
            self._open.close(group)  # its time may be up before `_expire` has woken: its other calls must end as well
            return []
        except asyncio.CancelledError:
            # Cancelled once for the closed group; any more and the whole run is being stopped.
            if group.is_closed and not task.uncancel():
                return []
            raise
        finally:
            group.note_rollout_ended()
            self._reporter.count(cost(group.rollouts.pop(number, []), ending))

    def _admitted(self, group: OpenGroup, slot: int, samples: list[Sample]) -> list[Sample]:
        """``samples`` in their slot, as far as the buffer takes them."""
        is_failed = samples[-1]["status"] == "failed"
        group.note_sample()
        self._reporter.note_sample(is_failed)
        if group.is_complete:
            self._hold.note_complete(group.group_id)
            if group.num_left > 1:
                self._open.end_rest(group)
        if self._parts.link.takes_failed:
            return [{**sample, "slot": slot} for sample in samples]
        if is_failed:
            logger.error("not sent to a buffer that knows no failed samples: %s", samples[-1]["error"]["message"])
            return []
        return [{**samples[-1], "slot": slot}]  # it knows no forks either

    # --- between steps

    def _note_step(self, step: Step | None) -> None:
        if step is not None:
            # Before the hold ends: calls that go out then carry the new version.
            self._parts.ring.announce(step.weights)
            self._hold.note_step(step)

    def _note_held(self, is_held: bool) -> None:
        self._reporter.note_held(is_held)
        if not is_held:
            return
        self._reporter.count({"steps_held": 1})
        oversampling = self._parts.plan.oversampling
        if oversampling is None or oversampling.leftover == "keep":
            self._open.keep_rest()
            return
        for group in self._open.unfinished():
            self._begin_afresh(group)

    def _begin_afresh(self, group: OpenGroup) -> None:
        """Throw away the rollouts in flight; others take their slots in the next step."""
        # Takes the free slots away, so that a rollout which ends meanwhile fills none.
        fresh = group.afresh()
        self._open.end_rest(group)
        self._add(fresh)
        self._rollouts.create_task(self._start_rollouts(fresh))


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
        # Another one has its id where the rollouts of a step were thrown away.
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
        calls = group.calls()  # before it is closed: tasks that are cancelled forget their calls
        group.close()
        self.services.create_task(self._ring.abort(group.rid_prefix, calls))

    def end_rest(self, group: OpenGroup) -> None:
        """End the rollouts of a group that needs them no more, their calls first: so it is known what they sampled."""

        async def end() -> None:
            await self._ring.stop(group.calls)
            group.close()
            if self._hold.is_held:  # nothing else is going on that would be reported
                self._reporter.flush()

        # Shut now, so that no other call goes out; closed once it is known from the engines what its calls sampled.
        group.shut()
        self.services.create_task(end())

    # --- all of them

    def keep_rest(self) -> None:
        """End the calls in flight: the turns go on with others, which wait until the run is no longer held."""

        async def end() -> None:
            await self._ring.stop(self._calls_between_steps, limit_s=None)
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
        await self._ring.abort(run_rid_prefix(run_id), calls)

    def close_all(self) -> None:
        """What still runs in threads ends with its next call."""
        for group in self._groups.values():
            group.close()


def _leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure
