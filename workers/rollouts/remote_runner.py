"""Runs rollouts in workers and has them deliver the samples; repeats both in another worker when one dies."""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.errors import ForebayError
from forebay.core.ids import attempt_rid_prefix
from forebay.core.outcome import RolloutOutcome
from forebay.core.task_row import TaskRow
from forebay.core.tasks import TaskSet
from forebay.engines.capture.sample_fields import Recorded
from forebay.engines.pool import Call
from forebay.generators.job.ports import JobContext
from forebay.generators.rollouts.open_group import (
    Execution,
    GroupClosed,
    GroupPlan,
    OpenGroup,
    RolloutBroken,
    RolloutLost,
)
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.generators.rollouts.samples import Unbegun, failed_sample
from forebay.telemetry.tracing.trace_ids import new_span_id
from forebay.workers.members.worker_errors import WorkerLost
from forebay.workers.rollouts.orders import Done, Order, Span, decode, encode
from forebay.workers.rollouts.remote_traces import remote_attempt
from forebay.workers.rollouts.run_worker import RunWorker
from forebay.workers.rollouts.supervisor import MAX_DEATHS, WorkerSupervisor

logger = logging.getLogger(__name__)

LAST_WORD_S = 2.0
"""Longest wait for a rollout that is not needed any more to report its sampled tokens."""
WORKERS = "workers"
"""Stands for an engine's address in all calls of a rollout that a worker makes."""
STREAMS = "/streams"


@dataclass
class RemoteRecord:
    """The counters of what a worker recorded; the lead has nothing else of it."""

    counters: Mapping[str, int] = field(default_factory=dict)

    def sample_fields(self) -> Sequence[dict[str, Any]]:
        """Always empty: the worker has the fields."""
        return ()


@dataclass
class RemoteExecution:
    """The counted parts of one attempt."""

    num_sampled_tokens: int = 0
    trajectory: Recorded = field(default_factory=RemoteRecord)


@dataclass(eq=False)
class RemoteRollout:
    """A rollout from its first order to a worker until its sample is on the disk or no longer needed."""

    uid: str
    plan: GroupPlan
    number: int
    attempt: int
    """The latest attempt known to the lead."""
    group: OpenGroup | None = None
    rollout_slot: RolloutSlot | None = None
    is_done: bool = False
    """Whether it has ended; its samples wait in its worker."""
    slot: int | None = None
    """Slot of its sample, once assigned."""
    worker: RunWorker | None = None
    """The worker that has it; None once that worker is gone."""
    is_dropped: bool = False
    """Whether its worker was notified that it is not needed."""

    def order(
        self,
        engine: str | None,
        cap_tokens: int | None,
        left_s: float,
        waited: tuple[str, int, list[Span]],
    ) -> Order:
        """The order to a worker."""
        return Order(
            uid=self.uid,
            row=line_of(self.plan.row),
            row_number=self.plan.row.number,
            epoch=self.plan.epoch,
            number=self.number,
            attempt=self.attempt,
            left_s=left_s,
            engine=engine,
            cap_tokens=cap_tokens,
            span=waited[0],
            lasted=waited[1],
            waits=waited[2],
        )

    @property
    def execution(self) -> RemoteExecution | None:
        """The current attempt."""
        known = self.group.rollouts.get(self.number) if self.group is not None else None
        return known[-1] if known and isinstance(known[-1], RemoteExecution) else None

    def note_moved(self, engine: str | None, attempt: int) -> None:
        """Record the engine (None for no engine) and the attempt that its worker reported."""
        if self.is_done or attempt < self.attempt:
            return
        while self.attempt < attempt:
            self.attempt += 1
            if self.group is not None:
                self.group.note_rollout(self.number, RemoteExecution())
        if self.rollout_slot is not None:
            self.rollout_slot.move(engine)

    def note_tokens(self, tokens: int) -> None:
        """Record the tokens that its current attempt has sampled."""
        if (execution := self.execution) is not None:
            execution.num_sampled_tokens = tokens

    def note_done(self, done: Done) -> None:
        """Record its end, with the tokens of its attempts."""
        self.is_done = True
        if self.group is not None:
            last = len(done.tokens) - 1
            executions: list[Execution] = [RemoteExecution(each) for each in done.tokens]
            if executions:
                executions[last].trajectory = RemoteRecord(done.counters)
            self.group.rollouts[self.number] = executions

    @contextmanager
    def standing_for_calls(self, group: OpenGroup) -> Iterator[None]:
        """Enter placeholders in the group for its calls in flight: one for whole replies, one for streams."""
        whole, streams = (WORKERS, self.uid), (WORKERS, self.uid + STREAMS)
        group.begin_stream(streams)
        try:
            with group.in_flight(whole):
                yield
        finally:
            group.end_stream(streams)

    def failed(self, error: ForebayError, slot: int) -> Sample:
        """A failed sample, for a rollout that no worker completed."""
        unbegun = Unbegun(self.plan, self.uid, self.number, slot, self.attempt)
        return failed_sample(unbegun, error, RolloutOutcome.ENVIRONMENT_FAILURE)


class KilledWorkers(ForebayError):
    """Every worker that ran a rollout has died."""

    code = "killed_workers"

    def __init__(self, reason: str) -> None:
        super().__init__(f"each worker that ran it has died; the last one: {reason}")


class TookTooLong(ForebayError):
    """A rollout was repeated because its sample was lost, and exceeded the time of a group."""

    code = "took_too_long"

    def __init__(self) -> None:
        super().__init__("its sample was lost with its worker; the repeated rollout exceeded the group's time limit")


def uids_of(calls: Sequence[Call]) -> tuple[list[str], bool]:
    """The rollouts that these placeholder calls stand for, and whether their streams are included."""
    uids = [uid.removesuffix(STREAMS) for url, uid in calls if url == WORKERS]
    return list(dict.fromkeys(uids)), any(uid.endswith(STREAMS) for _, uid in calls)


def line_of(row: TaskRow) -> bytes:
    """The row as a line of JSON."""
    try:
        return msgspec.json.encode(row.fields)
    except OverflowError:  # an integer of more than 64 bits
        return json.dumps(row.fields).encode()


class RemoteRunner:
    """Replaces a job's ``RolloutRunner``. The samples it returns are placeholders; the worker keeps the real ones.

    ``rollouts`` has all rollouts that workers still hold, by uid. ``own`` writes failed samples of rollouts that no
    worker survives.
    """

    def __init__(
        self,
        around: JobContext,
        workers: WorkerSupervisor,
        rollouts: dict[str, RemoteRollout],
        own: AsyncWriter,
    ) -> None:
        self._around, self._workers, self._rollouts, self._own = around, workers, rollouts, own
        self._tasks = TaskSet()

    async def close(self) -> None:
        """Cancel its tasks."""
        await self._tasks.cancel()

    async def when_ready(self) -> None:
        """Wait until some worker takes rollouts. Implements ``JobRunner``."""
        await self._workers.when_any_ready()

    async def samples(
        self, group: OpenGroup, number: int, trace: RolloutTrace, rollout_slot: RolloutSlot
    ) -> list[Sample]:
        """Run one rollout. Implements ``JobRunner``; also raises ``RolloutLost`` when the worker dies."""
        rollout = RemoteRollout(trace.uid, group.plan, number, trace.num_attempts - 1, group, rollout_slot)
        if self._is_deadly(rollout):
            return [rollout.failed(KilledWorkers(self._workers.last_reason), number)]
        worker = await self._taken(rollout)
        try:
            done = await self._done(rollout, worker, trace, group, rollout_slot)
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
        self,
        rollout: RemoteRollout,
        worker: RunWorker,
        trace: RolloutTrace,
        group: OpenGroup,
        rollout_slot: RolloutSlot,
    ) -> Done:
        engine = rollout_slot.preferred or self._around.loads.least()
        rollout_slot.move(engine)
        attempt = remote_attempt(trace)
        attempt.worker = worker.number
        group.note_rollout(rollout.number, RemoteExecution())
        order = rollout.order(engine, rollout_slot.cap_tokens, group.deadline_left_s(), attempt.waited())
        running = self._tasks.start(self._ran(rollout, worker, order))
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # may have no waiter left
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
        """Run a rollout in a worker and wait for its end. Raises ``RolloutLost``."""
        rollout.worker = worker
        self._rollouts[rollout.uid] = rollout
        try:
            done = decode(await worker.call("rollout", encode(order)), Done)
        except Exception as error:  # noqa: BLE001 - any error means that the worker lost it
            self._workers.note_lost(worker, error)
            self._tasks.start(self._abort(rollout))
            raise RolloutLost(self._workers.last_reason) from None
        rollout.note_done(done)
        return done

    async def _abort(self, rollout: RemoteRollout) -> None:
        # Only this attempt: the next one runs elsewhere, and an abort is repeated until no call is left.
        run_id, attempt = self._around.plan.run_id, rollout.attempt
        await self._around.pool.abort(attempt_rid_prefix(run_id, rollout.plan.group_id, rollout.number, attempt))

    def drop(self, rollout: RemoteRollout, ending: str) -> None:
        """Have the worker discard a rollout or its sample, which is not needed any more."""
        if rollout.worker is not None and rollout.slot is None and not rollout.is_dropped:
            rollout.is_dropped = True
            rollout.worker.send("drop", rollout.uid, ending)

    async def deliver(self, rollout: RemoteRollout, slot: int) -> bool:
        """Have the sample of a rollout sent to its slot; repeats the rollout if its worker dies.

        Returns True once the buffer has stored or refused it, False if the lead's writer got a failed sample instead.
        """
        while True:
            if (worker := rollout.worker) is not None:
                try:
                    await worker.call("deliver", rollout.uid, slot)
                except Exception as error:  # noqa: BLE001 - any error means that it was not delivered
                    self._workers.note_lost(worker, error)
                    # A lost worker may have died of another rollout; any other error may be due to this sample.
                    self._workers.deaths[rollout.uid] += not isinstance(error, WorkerLost)
                else:
                    return True
            logger.warning("the sample of rollout %s was lost with its worker; repeating the rollout", rollout.uid)
            if not await self._made_again(rollout, slot):
                return False

    async def _made_again(self, rollout: RemoteRollout, slot: int) -> bool:
        rollout.group = rollout.rollout_slot = None  # the first copy is already counted there
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
            if done.status == "closed":  # it has no sample, but its slot waits for one
                await self._own.write(rollout.failed(TookTooLong(), slot))
                return False
            return True
