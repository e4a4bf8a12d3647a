"""One pass of a run process over its schedule: rollouts and their background tasks."""

import asyncio
import logging
from collections.abc import Iterator

from forebay.client.sample_writer.outbox import Sample
from forebay.core.scheduling.policy import RolloutEnd
from forebay.generators.buffer_link.abc import ClosedGroups, RunGone, Step
from forebay.generators.job.concurrency_limits import SHRINK, YIELD, adjust_places
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
    """Fills the groups of a schedule in the order and on the engines chosen by the policy."""

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
        """Run until the end of the schedule, or until the run is gone.

        Raises ``InputRefused`` for an invalid row, after writing all samples of the rows before it.
        """
        try:
            await self._serve()
        except BaseExceptionGroup as failures:  # raise one cause instead of the group
            first = next(_leaves(failures))
            if not isinstance(first, RunGone):
                raise first from None
            logger.info("stopping: %s", first)
            self._reporter.totals.is_stopped = True
            await self._open.stop(self._parts.plan.run_id)
        finally:
            # Threads cannot be cancelled: they end when their next call raises `GroupClosed`.
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
            # A writer error also ends the rollouts, because their samples could not be written.
            services.create_task(self._parts.writer.watch())
            places = services.create_task(self._adjust_places())
            # The writer may be closed only after this block, when no rollout can produce a sample.
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
            # Cancelled first: the final report ends the run, after which the feed would raise `RunGone`.
            feed.cancel()
            places.cancel()
            await self._reporter.finish()
            reports.cancel()

    async def _adjust_places(self) -> None:
        if self._parts.replayed is not None:
            await self._parts.replayed.has_left.wait()  # until then, no engine is needed
        if self._parts.adjusts_places:
            shrink = YIELD if self._parts.leaves_room else SHRINK
            await adjust_places(self._parts.pool, self._parts.loads, self._dispatcher.changed.notify, shrink)

    async def _follow_closed(self) -> None:
        """Close groups that the buffer has closed. Raises ``RunGone`` when the run was stopped."""
        plan, link = self._parts.plan, self._parts.link
        answer = ClosedGroups(last=plan.last_closed, seen=NOTHING_SEEN)
        while link.has_feed:
            answer = await link.closed_groups(answer)
            for group_id in answer.group_ids:
                self._dispatcher.close_id(group_id)
            self._note_step(answer.step)
            self._hold.note_paused(answer.is_paused)
            self._reporter.note_still(answer.is_still)
            if answer.is_run_over:
                raise RunGone("the run was stopped")

    # --- rollouts

    async def _run_rollout(self, group: OpenGroup, trace: RolloutTrace, rollout_slot: RolloutSlot) -> None:
        """Run a chosen rollout until its sample is written, or it is capped, lost or no longer needed."""
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
        """Return the rollouts that can be written now that this one has ended."""
        if finished is None or not self._deferral.is_on:
            return [] if finished is None else [finished]
        self._deferral.hold_back(group.group_id, finished)
        whole = self._deferral.take_held_back(group.group_id) if group.is_complete else []
        if not whole:
            finished.trace.wait("group")
        for rollout in whole:
            self._reporter.count(rollout.used)
        return whole

    async def _finished(
        self, group: OpenGroup, trace: RolloutTrace, rollout_slot: RolloutSlot
    ) -> FinishedRollout | None:
        """Run the rollout and return it with its samples; None if its group does not need them."""
        task, finished = asyncio.current_task(), None
        assert task is not None
        try:
            with group.working():
                samples = await self._parts.runner.samples(group, rollout_slot.rollout.number, trace, rollout_slot)
                await self._wait_held(trace)  # the step may have enough groups
            finished = self._admitted(group, rollout_slot.rollout.number, samples, trace)
        except RolloutBroken:
            trace.ending = "broken"
        except RolloutLost:
            trace.ending = "lost"
        except GroupClosed:
            self._open.close(group)  # it may expire before `_expire` wakes up, and its other calls must end too
        except asyncio.CancelledError:
            # One cancellation comes from the closed group; any further one stops the whole run.
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
        """Return the rollout with its slot; None if its group has no slot for it or the buffer does not accept it."""
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
            logger.error("failed sample not sent, the buffer does not accept it: %s", samples[-1]["error"]["message"])
            return None
        return FinishedRollout([{**samples[-1], "slot": slot}], trace)  # nor does it accept forks

    def _note_complete(self, group: OpenGroup) -> None:
        self._deferral.note_ended(group.group_id)
        self._hold.note_complete(group.group_id)
        if group.num_left > 1:
            self._open.end_rest(group)

    def _note_closed(self, group: OpenGroup) -> None:
        """Handle a group that ends before its last rollout."""
        self._dispatcher.forget(group)
        if not group.is_complete:
            self._throw_away(group)

    def _throw_away(self, group: OpenGroup) -> None:
        for rollout in self._deferral.throw_away(group.group_id):
            self._reporter.count(rollout.thrown)

    # --- between steps

    def _note_step(self, step: Step | None) -> None:
        if step is not None:
            # Before the run resumes, so that the next calls carry the new version.
            self._parts.pool.announce(step.weights)
            if step.number != self._hold.step:
                self._policy.begin_step(step.number)
                self._deferral.begin_step()
            self._hold.note_step(step)
            self._dispatcher.changed.notify()  # the step may begin further groups now

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
