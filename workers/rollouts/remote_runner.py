"""Running rollouts in workers, and having their samples delivered: again in another worker where one dies."""

import asyncio
import logging
from collections.abc import Callable

from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.ids import attempt_rid_prefix
from forebay.core.tasks import TaskSet
from forebay.core.waiting import Signal
from forebay.generators.job.ports import JobSurroundings
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup, RolloutBroken, RolloutLost
from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.generators.rollouts.seat import Seat
from forebay.telemetry.tracing.trace_ids import new_span_id
from forebay.workers.members.worker_errors import WorkerLost
from forebay.workers.rollouts.orders import Done, Order, decode, encode
from forebay.workers.rollouts.remote_rollout import KilledWorkers, RemoteExecution, RemoteRollout, TookTooLong
from forebay.workers.rollouts.remote_traces import remote_attempt
from forebay.workers.rollouts.run_worker import RunWorker
from forebay.workers.rollouts.supervisor import MAX_DEATHS, WorkerSupervisor

logger = logging.getLogger(__name__)

LAST_WORD_S = 2.0
"""So long a rollout that is not needed any more is waited for, to tell what it has sampled."""


class RemoteRunner:
    """In place of a ``RolloutRunner``, for a job: what it gives as samples stands for those that a worker has.

    ``rollouts`` are all that workers have something of, by uid; ``own`` takes the samples of rollouts that no worker
    survives.
    """

    def __init__(
        self,
        around: JobSurroundings,
        workers: WorkerSupervisor,
        rollouts: dict[str, RemoteRollout],
        own: AsyncWriter,
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
        rollout = RemoteRollout(trace.uid, group.plan, number, trace.num_attempts - 1, group, seat)
        if self._is_deadly(rollout):
            return [rollout.failed(KilledWorkers(self._workers.last_reason), number)]
        worker = await self._taken(rollout)
        try:
            done = await self._done(rollout, worker, trace, group, seat)
        finally:
            self._workers.release(worker, rollout.uid)
        if done.status == "broken":
            raise RolloutBroken(rollout.uid)
        if done.status == "closed":
            raise GroupClosed(group.group_id)
        return [{"uid": rollout.uid, "status": done.status, "error": {"message": done.error}, "extra_info": {}}]

    def _is_deadly(self, rollout: RemoteRollout) -> bool:
        return self._workers.deaths[rollout.uid] > MAX_DEATHS

    async def _taken(self, rollout: RemoteRollout) -> RunWorker:
        alone = self._workers.deaths[rollout.uid] == MAX_DEATHS
        return await self._workers.take(rollout.uid, alone=alone, num_places=self._around.loads.num_places)

    async def _done(
        self, rollout: RemoteRollout, worker: RunWorker, trace: RolloutTrace, group: OpenGroup, seat: Seat
    ) -> Done:
        engine = seat.preferred or self._around.loads.least()
        seat.move(engine)
        attempt = remote_attempt(trace)
        attempt.worker = worker.number
        group.note_rollout(rollout.number, RemoteExecution())
        order = rollout.order(engine, seat.cap_tokens, group.deadline_left_s(), attempt.waited())
        running = self._tasks.start(self._ran(rollout, worker, order))
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may come too late
        try:
            with rollout.standing_for_calls(group):
                return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.drop(rollout, "aborted")
            await asyncio.wait((running,), timeout=LAST_WORD_S)
            raise
        finally:
            trace.num_attempts = rollout.attempt + 1

    async def _ran(self, rollout: RemoteRollout, worker: RunWorker, order: Order) -> Done:
        """The end of a rollout in a worker. Raises ``RolloutLost``."""
        rollout.worker = worker
        self._rollouts[rollout.uid] = rollout
        try:
            done = decode(await worker.call("rollout", encode(order)), Done)
        except Exception as error:  # noqa: BLE001 - whatever keeps a worker from running it
            self._workers.note_lost(worker, error)
            self._tasks.start(self._abort(rollout))
            raise RolloutLost(self._workers.last_reason) from None
        rollout.note_done(done)
        return done

    async def _abort(self, rollout: RemoteRollout) -> None:
        # Of this attempt alone: the next one has begun elsewhere, and an abort is repeated until nothing is left.
        run_id, attempt = self._around.plan.run_id, rollout.attempt
        await self._around.ring.abort(attempt_rid_prefix(run_id, rollout.plan.group_id, rollout.number, attempt))

    def drop(self, rollout: RemoteRollout, ending: str) -> None:
        """A rollout, or its sample, is not needed any more."""
        if rollout.worker is not None and rollout.slot is None and not rollout.is_dropped:
            rollout.is_dropped = True
            rollout.worker.send("drop", rollout.uid, ending)

    async def deliver(self, rollout: RemoteRollout, slot: int) -> bool:
        """Have the sample of a rollout sent to its slot, if need be another copy of it.

        Whether it is on the buffer's disk, or was refused; else the lead's own writer has a failed one in its place.
        """
        while True:
            if (worker := rollout.worker) is not None:
                try:
                    await worker.call("deliver", rollout.uid, slot)
                except Exception as error:  # noqa: BLE001 - as above
                    self._workers.note_lost(worker, error)
                    # Where the worker was gone, another rollout was why; else it may be this sample.
                    self._workers.deaths[rollout.uid] += not isinstance(error, WorkerLost)
                else:
                    return True
            logger.warning("the sample of rollout %s was lost with its worker: it is made again", rollout.uid)
            if not await self._made_again(rollout, slot):
                return False

    async def _made_again(self, rollout: RemoteRollout, slot: int) -> bool:
        rollout.group = rollout.seat = None  # its first copy is counted there
        rollout.is_done = False
        while True:
            rollout.attempt += 1
            if self._is_deadly(rollout):
                await self._own.write(rollout.failed(KilledWorkers(self._workers.last_reason), slot))
                return False
            worker = await self._taken(rollout)
            left_s = self._around.plan.group_deadline_s
            order = rollout.order(self._around.loads.least(), None, left_s, (new_span_id(), 0, []))
            try:
                done = await self._ran(rollout, worker, order)
            except RolloutLost:
                continue
            finally:
                self._workers.release(worker, rollout.uid)
            if done.status == "closed":  # without a sample, and its slot waits for one
                await self._own.write(rollout.failed(TookTooLong(), slot))
                return False
            return True


class RemoteWriter:
    """In place of an ``AsyncWriter``, for a job: the workers send the samples, and ``own`` those that no worker has.

    Up to ``max_waiting`` may be on their way. ``on_judged`` is told of each that is on the disk, or was refused.
    """

    def __init__(
        self,
        own: AsyncWriter,
        rollouts: dict[str, RemoteRollout],
        runner: RemoteRunner,
        max_waiting: int,
        on_judged: Callable[[Sample], None],
    ) -> None:
        self._own, self._rollouts, self._runner, self._max_waiting = own, rollouts, runner, max_waiting
        self._on_judged = on_judged
        self._on_way: set[str] = set()
        self._changed = Signal()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSet()

    async def write(self, sample: Sample) -> None:
        """Of ``JobWriter``, as those below."""
        rollout = self._rollouts.get(sample["uid"])
        if rollout is None or "messages" in sample:
            await self._own.write(sample)
            return
        while len(self._on_way) >= self._max_waiting:
            await self._changed.wait()
        self._on_way.add(rollout.uid)
        rollout.slot = sample["slot"]
        self._tasks.start(self._deliver(rollout, sample["slot"]))

    async def watch(self) -> None:
        own = asyncio.ensure_future(self._own.watch())
        try:
            await asyncio.wait((own, self._failure), return_when=asyncio.FIRST_COMPLETED)
            for each in (own, self._failure):
                if each.done():
                    each.result()
        finally:
            own.cancel()

    async def close(self) -> None:
        while self._on_way:
            await self._changed.wait()
        await self._own.close()

    async def stop(self) -> None:
        """The job is over, whatever waits."""
        await self._tasks.cancel()
        await self._own.stop()

    async def _deliver(self, rollout: RemoteRollout, slot: int) -> None:
        if await self._runner.deliver(rollout, slot):
            self.note_judged({"uid": rollout.uid})

    def note_judged(self, sample: Sample) -> None:
        """The sample of a rollout is on the disk, or was refused."""
        self._on_way.discard(sample["uid"])
        self._changed.notify()
        self._on_judged(sample)

    def fail(self, error: BaseException) -> None:
        """Nothing can be written any more."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # a job that has ended otherwise does not ask for it
