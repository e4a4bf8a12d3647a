"""Running rollouts in workers: each is sent to one, and again to another where that dies."""

import asyncio
import logging

from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.ids import attempt_rid_prefix
from forebay.core.tasks import TaskSet
from forebay.generators.job.places import JobSurroundings
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup, RolloutBroken, RolloutLost
from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.generators.rollouts.seat import Seat
from forebay.telemetry.tracing.trace_ids import new_span_id
from forebay.workers.rollouts.messages import Assignment, EndRollout, GrantSlot, RolloutDone, RolloutMoved
from forebay.workers.rollouts.placed_rollout import KilledWorkers, PlacedRollout, RemoteExecution, TookTooLong
from forebay.workers.rollouts.placed_traces import placed_attempt
from forebay.workers.rollouts.placed_worker import PlacedWorker
from forebay.workers.rollouts.worker_set import MAX_DEATHS, WorkerSet

logger = logging.getLogger(__name__)

LAST_WORD_S = 2.0
"""So long a rollout that nobody needs any more is waited for, to tell what it has sampled."""


class PlacedRunner:
    """In place of a ``RolloutRunner``, for a job: what it gives as samples stands for those that a worker has.

    ``rollouts`` are all that workers have something of, by uid; ``own`` takes the samples of rollouts that no worker
    survives.
    """

    def __init__(
        self, around: JobSurroundings, workers: WorkerSet, rollouts: dict[str, PlacedRollout], own: AsyncWriter
    ) -> None:
        self._around, self._workers, self._rollouts, self._own = around, workers, rollouts, own
        self._tasks = TaskSet()

    async def close(self) -> None:
        """The job is over."""
        await self._tasks.cancel()

    async def when_ready(self) -> None:
        """Of ``JobRunner``: when some worker takes rollouts."""
        await self._workers.when_any_ready()

    async def samples(self, group: OpenGroup, number: int, trace: RolloutTrace, seat: Seat) -> list[Sample]:
        """Of ``JobRunner``; raises ``RolloutLost`` besides, when the worker dies."""
        placed = PlacedRollout(trace.uid, group.plan, number, trace.num_attempts - 1, new_future(), group, seat)
        if self._is_deadly(placed):
            return [placed.failed(KilledWorkers(self._workers.last_reason), number)]
        member = await self._taken(placed)
        try:
            done = await self._done(placed, member, trace, seat)
        finally:
            self._workers.release(member, placed.uid)
        if done.status == "broken":
            raise RolloutBroken(placed.uid)
        if done.status == "closed":
            raise GroupClosed(group.group_id)
        return [{"uid": placed.uid, "status": done.status, "error": {"message": done.error}, "extra_info": {}}]

    def _is_deadly(self, placed: PlacedRollout) -> bool:
        return self._workers.deaths[placed.uid] > MAX_DEATHS

    async def _taken(self, placed: PlacedRollout) -> PlacedWorker:
        alone = self._workers.deaths[placed.uid] == MAX_DEATHS
        return await self._workers.take(placed.uid, alone=alone, num_places=self._around.loads.num_places)

    async def _done(self, placed: PlacedRollout, member: PlacedWorker, trace: RolloutTrace, seat: Seat) -> RolloutDone:
        assert placed.group is not None
        engine = seat.preferred or self._around.loads.least()
        seat.move(engine)
        attempt = placed_attempt(trace)
        attempt.worker = member.number
        placed.group.note_rollout(placed.number, RemoteExecution())
        left_s = placed.group.deadline_left_s()
        self._send(placed, member, placed.assignment(engine, seat.cap_tokens, left_s, attempt.waited()))
        try:
            with placed.standing_for_calls(placed.group):
                return await asyncio.shield(placed.done)
        except asyncio.CancelledError:
            await self._last_word(placed)
            raise
        finally:
            trace.num_attempts = placed.attempt + 1

    def _send(self, placed: PlacedRollout, member: PlacedWorker, assignment: Assignment) -> None:
        placed.member = member
        self._rollouts[placed.uid] = placed
        member.send(assignment)

    async def _last_word(self, placed: PlacedRollout) -> None:
        self.end(placed, "aborted")
        if placed.member is not None:
            await asyncio.wait((placed.done,), timeout=LAST_WORD_S)

    # --- what the job decides

    def grant(self, placed: PlacedRollout) -> None:
        """The sample of a rollout goes to its slot."""
        assert placed.slot is not None
        if placed.member is not None:
            placed.member.send(GrantSlot(placed.uid, placed.slot))
        else:
            self._tasks.start(self._make_again(placed))

    def end(self, placed: PlacedRollout, ending: str) -> None:
        """Nobody needs a rollout any more, or its sample."""
        if placed.member is not None and placed.slot is None and not placed.is_ended:
            placed.is_ended = True
            placed.member.send(EndRollout(placed.uid, "failed" if ending == "failed" else "aborted"))

    # --- what workers say

    def note_moved(self, placed: PlacedRollout, message: RolloutMoved) -> None:
        """It is on another engine, or on none."""
        placed.note_attempt(message.attempt)
        if placed.seat is not None:
            placed.seat.move(message.engine)

    # --- when a worker dies

    def note_lost(self, member: PlacedWorker) -> None:
        """What it had is run again; its calls are aborted."""
        for placed in [each for each in self._rollouts.values() if each.member is member]:
            placed.member = None
            if not placed.done.done():
                self._tasks.start(self._abort(placed))
                placed.done.set_exception(RolloutLost(self._workers.last_reason))
                placed.done.exception()  # nobody may wait for it any more
            elif placed.slot is not None:
                self._tasks.start(self._make_again(placed))

    async def _abort(self, placed: PlacedRollout) -> None:
        # Of this attempt alone: the next one has begun elsewhere, and an abort is repeated until nothing is left.
        run_id, attempt = self._around.plan.run_id, placed.attempt
        await self._around.ring.abort(attempt_rid_prefix(run_id, placed.plan.group_id, placed.number, attempt))

    async def _make_again(self, before: PlacedRollout) -> None:
        """The sample of a rollout was lost that has its slot: the slot stays, and another copy of it goes there."""
        slot, attempt = before.slot, before.attempt
        assert slot is not None
        logger.warning("the sample of rollout %s was lost with its worker: it is made again", before.uid)
        while True:
            attempt += 1
            placed = PlacedRollout(before.uid, before.plan, before.number, attempt, new_future(), slot=slot)
            if self._is_deadly(placed):
                await self._own.write(placed.failed(KilledWorkers(self._workers.last_reason), slot))
                return
            member = await self._taken(placed)
            try:
                left_s = self._around.plan.group_deadline_s
                self._send(
                    placed,
                    member,
                    placed.assignment(self._around.loads.least(), None, left_s, (new_span_id(), 0, [])),
                )
                done = await asyncio.shield(placed.done)
            except RolloutLost:
                continue
            finally:
                self._workers.release(member, placed.uid)
            if done.status == "closed":  # without a sample, and its slot waits for one
                await self._own.write(placed.failed(TookTooLong(), slot))
            return


def new_future() -> "asyncio.Future[RolloutDone]":
    """For the end of a rollout."""
    return asyncio.get_running_loop().create_future()
