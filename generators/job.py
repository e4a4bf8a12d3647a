"""One pass of a run process over its schedule: the rollouts, and the tasks that serve them."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.core.active_clock import ActiveClock
from forebay.core.errors import InputRefused
from forebay.core.ids import run_rid_prefix
from forebay.generators.engine_ring import EngineRing
from forebay.generators.groups import GroupClosed, OpenGroup
from forebay.generators.link import Link, RunGone
from forebay.generators.reporter import Reporter, Totals
from forebay.generators.runner import RolloutRunner
from forebay.generators.schedule import GroupPlan, Plan, Schedule
from forebay.generators.writer import Sample, Writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobParts:
    """What a job works with; all of it is open already, and closed by whoever opened it."""

    plan: Plan
    schedule: Schedule
    link: Link
    ring: EngineRing
    runner: RolloutRunner
    writer: Writer
    reporter: Reporter
    clock: ActiveClock
    num_concurrent: int


class RolloutJob:
    """Fills the groups of a schedule, ``num_concurrent`` rollouts at a time."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._reporter = parts.reporter
        self._open: dict[str, OpenGroup] = {}
        self._places = asyncio.Semaphore(parts.num_concurrent)
        self._services: asyncio.TaskGroup
        self._input_error: InputRefused | None = None

    async def run(self) -> Totals:
        """Run to the end of the schedule, or until the run is gone.

        Raises ``InputRefused`` for a row that cannot be used, after everything before it was written.
        """
        try:
            await self._serve()
        except BaseExceptionGroup as failures:  # one cause is told, not the group
            first = next(_leaves(failures))
            if not isinstance(first, RunGone):
                raise first from None
            logger.info("stopping: %s", first)
            await self._stop()
        finally:
            self._close_all()
        if self._input_error is not None:
            raise self._input_error
        return self._reporter.totals

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as services:
            self._services = services
            news = services.create_task(self._reporter.run())
            feed = services.create_task(self._follow_closed())
            writing = services.create_task(self._parts.writer.run())
            async with asyncio.TaskGroup() as slots:
                await self._fill(slots)
            self._parts.writer.finish()
            await writing
            # The report lets the run end, and the feed of an ended run says that it is gone.
            feed.cancel()
            await self._reporter.finish()
            news.cancel()

    async def _fill(self, slots: asyncio.TaskGroup) -> None:
        try:
            for planned in self._parts.schedule.groups():
                await self._start_group(planned, slots)
        except InputRefused as error:
            # The rollouts in progress go on to their end, and what they bring is written.
            self._input_error = error

    async def _start_group(self, planned: GroupPlan, slots: asyncio.TaskGroup) -> None:
        await self._places.acquire()
        await self._reporter.announce((planned.row.instance_id, planned.epoch))
        group = OpenGroup(self._parts.plan, planned, self._parts.clock)
        self._open[group.group_id] = group
        slots.create_task(self._expire(group))
        for slot in planned.slots:
            if slot != planned.slots[0]:
                await self._places.acquire()
            if group.is_closed:
                self._places.release()
                return
            slots.create_task(self._fill_slot(group, slot))

    async def _fill_slot(self, group: OpenGroup, slot: int) -> None:
        try:
            sample = await self._sample(group, slot)
            if sample is not None:
                group.note_sample()
                await self._hand_over(sample)
        finally:
            self._places.release()
            group.note_rollout_ended()

    async def _sample(self, group: OpenGroup, slot: int) -> Sample | None:
        """The slot's sample; None if its group was closed meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        try:
            with group.working():
                return await self._parts.runner.sample(group, slot)
        except GroupClosed:
            self._close(group)  # its time may be up before `_expire` has woken: its other calls must end as well
            return None
        except asyncio.CancelledError:
            # Cancelled once for the closed group; any more and the whole run is being stopped.
            if group.is_closed and not task.uncancel():
                return None
            raise

    async def _hand_over(self, sample: Sample) -> None:
        is_failed = sample["status"] == "failed"
        self._reporter.note_sample(is_failed)
        if is_failed and not self._parts.link.takes_failed:
            logger.error("not sent to a buffer that knows no failed samples: %s", sample["error"]["message"])
            return
        await self._parts.writer.put(sample)

    async def _expire(self, group: OpenGroup) -> None:
        """Close the group at its deadline, should the buffer not have said so before."""
        if await group.wait_expired():
            logger.warning("group %s of instance %r took too long", group.group_id, group.key[0])
            self._close(group)
        self._open.pop(group.group_id, None)

    async def _follow_closed(self) -> None:
        """Close the groups that the buffer closed. Raises ``RunGone`` when the run was stopped."""
        after = 0
        while self._parts.link.has_feed:
            told = await self._parts.link.closed_groups(after)
            after = told.last
            for group_id in told.group_ids:
                if (group := self._open.get(group_id)) is not None:
                    self._close(group)
            if told.is_run_over:
                raise RunGone("the run was stopped")

    def _close(self, group: OpenGroup) -> None:
        if group.is_finished:
            return
        self._reporter.totals.num_groups_closed += 1
        calls = group.calls()
        group.close()
        self._services.create_task(self._parts.ring.abort(group.rid_prefix, calls))

    async def _stop(self) -> None:
        self._reporter.totals.is_stopped = True
        calls = [call for group in self._open.values() for call in group.calls()]
        self._close_all()
        await self._parts.ring.abort(run_rid_prefix(self._parts.plan.run_id), calls)

    def _close_all(self) -> None:
        """What still runs in threads ends with its next call."""
        for group in self._open.values():
            group.close()


def _leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure
