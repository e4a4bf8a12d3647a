"""One pass of a run process over its schedule: the rollouts, and the tasks that serve them."""

import asyncio
import logging
from collections.abc import Iterator

from forebay.client.sample_writer.outbox import Sample
from forebay.core.scheduling.policy import RolloutEnd
from forebay.generators.buffer_link.abc import ClosedGroups, RunGone, Step
from forebay.generators.job.concurrency_limits import adjust_places
from forebay.generators.job.deferral import Deferral, FinishedRollout
from forebay.generators.job.dispatcher import Dispatcher
from forebay.generators.job.group_feed import GroupFeed, ScheduledGroups
from forebay.generators.job.open_groups import OpenGroups, cost
from forebay.generators.job.ports import JobParts
from forebay.generators.job.reporter import Totals
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup, RolloutBroken, RolloutLost
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import RolloutTrace

logger = logging.getLogger(__name__)

NOTHING_SEEN = -1


class RolloutJob:
    """Fills the groups of a schedule, in the order and on the engines that its policy chooses."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._reporter = parts.reporter
        self._hold = parts.hold
        self._policy = parts.policy
        self._deferral = Deferral(parts.plan, lambda: parts.hold.num_counted)
        self._feed = GroupFeed(
            parts.replayed or ScheduledGroups(parts.schedule.groups()), parts.policy, parts.plan, self._deferral
        )
        self._open = OpenGroups(parts.pool, parts.reporter, parts.hold, self._note_closed)
        self._traces = parts.traces
        self._dispatcher = Dispatcher(parts, self._feed, self._deferral, self._open, self._run_rollout)

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
            self._traces.close()
        if self._feed.error is not None:
            raise self._feed.error
        return self._reporter.totals

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as services:
            self._open.services = services
            reports = services.create_task(self._reporter.run())
            feed = services.create_task(self._follow_closed())
            # Its error ends the rollouts as well: what they would bring could not be written.
            services.create_task(self._parts.writer.watch())
            places = services.create_task(self._adjust_places())
            # Left only when no rollout can bring a sample any more: then the writer may be closed.
            async with asyncio.TaskGroup() as rollouts:
                self._hold.on_change = self._note_held
                self._note_step(self._parts.plan.step)
                if (replayed := self._parts.replayed) is not None:
                    services.create_task(replayed.writer.watch())
                    replayed.on_change = self._dispatcher.changed.notify
                    rollouts.create_task(replayed.run())
                await self._dispatcher.start_all(rollouts)
            await self._parts.writer.close()
            if replayed is not None:
                await replayed.writer.close()
            # The report lets the run end, and the feed of an ended run says that it is gone.
            feed.cancel()
            places.cancel()
            await self._reporter.finish()
            reports.cancel()

    async def _adjust_places(self) -> None:
        if self._parts.replayed is not None:
            await self._parts.replayed.has_left.wait()  # before it, no engine is asked for anything
        if self._parts.adjusts_places:
            await adjust_places(self._parts.pool, self._parts.loads, self._dispatcher.changed.notify)

    async def _follow_closed(self) -> None:
        """Close the groups that the buffer closed. Raises ``RunGone`` when the run was stopped."""
        plan, link = self._parts.plan, self._parts.link
        news = ClosedGroups(last=plan.last_closed, seen=NOTHING_SEEN)
        while link.has_feed:
            news = await link.closed_groups(news)
            for group_id in news.group_ids:
                self._dispatcher.close_id(group_id)
            self._note_step(news.step)
            self._hold.note_paused(news.is_paused)
            self._reporter.note_still(news.is_still)
            if news.is_run_over:
                raise RunGone("the run was stopped")

    # --- rollouts

    async def _run_rollout(self, group: OpenGroup, trace: RolloutTrace, rollout_slot: RolloutSlot) -> None:
        """One rollout that was chosen, until its sample is written, or it is broken, or not needed any more."""
        finished = None
        try:
            finished = await self._finished(group, trace, rollout_slot)
            for rollout in self._writable(group, finished):
                rollout.trace.write(rollout.samples[-1])
                for sample in rollout.samples:
                    await self._parts.writer.write(sample)
        finally:
            rollout_slot.leave()
            group.leave()
            if finished is None and not self._dispatcher.waits_again(rollout_slot.rollout):
                trace.end()
            self._dispatcher.changed.notify()

    def _writable(self, group: OpenGroup, finished: FinishedRollout | None) -> list[FinishedRollout]:
        """What can be written now that this rollout has ended."""
        if finished is None or not self._deferral.is_on:
            return [] if finished is None else [finished]
        self._deferral.hold_back(group.group_id, finished)
        whole = self._deferral.take_held_back(group.group_id) if group.is_complete else []
        for rollout in whole:
            self._reporter.count(rollout.used)
        return whole

    async def _finished(
        self, group: OpenGroup, trace: RolloutTrace, rollout_slot: RolloutSlot
    ) -> FinishedRollout | None:
        """The rollout with its samples, if its group needs them."""
        task, finished = asyncio.current_task(), None
        assert task is not None
        try:
            with group.working():
                samples = await self._parts.runner.samples(group, rollout_slot.rollout.number, trace, rollout_slot)
                await self._wait_held(trace)  # it could fill another group than the step needs
            finished = self._admitted(group, rollout_slot.rollout.number, samples, trace)
        except RolloutBroken:
            trace.ending = "broken"
        except RolloutLost:
            trace.ending = "lost"
        except GroupClosed:
            self._open.close(group)  # its time may be up before `_expire` has woken: its other calls must end as well
        except asyncio.CancelledError:
            # Cancelled once for the closed group; any more and the whole run is being stopped.
            if not group.is_closed or task.uncancel():
                raise
        finally:
            self._note_ended(group, trace, rollout_slot, finished)
        return finished

    def _note_ended(
        self, group: OpenGroup, trace: RolloutTrace, rollout_slot: RolloutSlot, finished: FinishedRollout | None
    ) -> None:
        number, ending = rollout_slot.rollout.number, trace.ending
        attempts = group.rollouts.pop(number, [])
        tokens = attempts[-1].num_sampled_tokens if attempts else 0
        if finished is not None and self._deferral.is_on:
            finished.used, finished.thrown = cost(attempts, ending), cost(attempts, "aborted")
        else:
            self._reporter.count(cost(attempts, ending))
        if ending == "broken" or ending == "lost":
            if ending == "broken":
                self._policy.broken(rollout_slot.rollout, tokens, rollout_slot.seconds)
            else:
                self._policy.lost(rollout_slot.rollout)
            self._dispatcher.wait_again(group, rollout_slot.rollout, trace)
            return
        group.note_rollout_ended()
        self._policy.ended(rollout_slot.rollout, RolloutEnd(ending, tokens, rollout_slot.seconds))

    async def _wait_held(self, trace: RolloutTrace) -> None:
        if self._hold.is_held:
            with trace.attempt.begin("hold"):
                await self._hold.wait()

    def _admitted(
        self, group: OpenGroup, number: int, samples: list[Sample], trace: RolloutTrace
    ) -> FinishedRollout | None:
        """The rollout in its slot, if its group has one for it, and the buffer takes it."""
        is_failed = samples[-1]["status"] == "failed"
        slot = group.admit(number, is_failed=is_failed)
        if slot is None:
            trace.ending = "failed" if is_failed else "aborted"
            return None
        trace.ending, trace.slot = "failed" if is_failed else "finished", slot
        group.note_sample()
        self._reporter.note_sample(is_failed)
        if group.is_complete:
            self._note_complete(group)
        if self._parts.link.takes_failed:
            return FinishedRollout([{**sample, "slot": slot} for sample in samples], trace)
        if is_failed:
            logger.error("not sent to a buffer that knows no failed samples: %s", samples[-1]["error"]["message"])
            return None
        return FinishedRollout([{**samples[-1], "slot": slot}], trace)  # it knows no forks either

    def _note_complete(self, group: OpenGroup) -> None:
        self._deferral.note_ended(group.group_id)
        self._hold.note_complete(group.group_id)
        if group.num_left > 1:
            self._open.end_rest(group)

    def _note_closed(self, group: OpenGroup) -> None:
        """A group ends before its last rollout has."""
        self._dispatcher.forget(group)
        if not group.is_complete:
            self._throw_away(group)

    def _throw_away(self, group: OpenGroup) -> None:
        for rollout in self._deferral.throw_away(group.group_id):
            self._reporter.count(rollout.thrown)

    # --- between steps

    def _note_step(self, step: Step | None) -> None:
        if step is not None:
            # Before the hold ends: calls that go out then carry the new version.
            self._parts.pool.announce(step.weights)
            if step.number != self._hold.step:
                self._policy.begin_step(step.number)
                self._deferral.begin_step()
            self._hold.note_step(step)
            self._dispatcher.changed.notify()  # the step may begin other groups now

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
            if oversampling.leftover == "discard":
                self._dispatcher.begin_afresh(group)
            else:
                self._throw_away(group)
                self._dispatcher.put_off(group)
        if oversampling.leftover == "defer":
            self._feed.withdraw()


def _leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure
