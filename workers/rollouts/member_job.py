"""One job inside a worker: runs the rollouts that the lead requests one by one, and reports on them."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from forebay.client.sample_writer.outbox import Sample
from forebay.core.clock import ActiveClock, SystemClock
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, RolloutKey
from forebay.core.task_row import parse_row
from forebay.core.tasks import TaskSet
from forebay.generators.buffer_link.abc import Plan, RunGone
from forebay.generators.failures import outcome_of
from forebay.generators.job.ports import MemberParts
from forebay.generators.rollouts.open_group import (
    Execution,
    GroupClosed,
    GroupPlan,
    OpenGroup,
    RolloutBroken,
    StepBarrier,
)
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import QueueWait, RolloutTrace, RolloutTraces
from forebay.generators.rollouts.samples import Unbegun, failed_sample
from forebay.telemetry.tracing.tracer import SpanHandle
from forebay.workers.rollouts.orders import Done, JobState, Order, TraceLines, WorkerStatus


class WorkerChanges:
    """Changes that the worker's next report will contain. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = _new_status()

    def take(self) -> WorkerStatus:
        """Return the changes since the last call, and the states that still hold."""
        with self._lock:
            report, self._next = self._next, _new_status()
            self._next.waits_for_engine = report.waits_for_engine
        return report

    def note_moved(self, uid: str, engine: str | None, attempt: int) -> None:
        """Record that a rollout now uses this engine, or none."""
        with self._lock:
            self._next.moves[uid] = engine, attempt

    def note_server(self, url: str, is_failing: bool) -> None:
        """Record that an engine stopped answering, or answers again."""
        with self._lock:
            self._next.servers.append((url, is_failing))

    def note_waiting(self, is_waiting: bool) -> None:
        """Record whether rollouts here wait because no engine answers."""
        with self._lock:
            self._next.waits_for_engine = is_waiting

    def note_failure(self, message: str, *, is_gone: bool) -> None:
        """Record that the worker cannot continue its job."""
        with self._lock:
            self._next.failure, self._next.is_gone = message, is_gone

    def note_trace(self, lines: TraceLines) -> None:
        """Add trace lines for the lead to write."""
        with self._lock:
            self._next.trace.append(lines)


def _new_status() -> WorkerStatus:
    return WorkerStatus({}, [], False, 0.0, "", False, "", [])


class MemberSlot(RolloutSlot):
    """A slot that the lead counts. Moves are reported to the lead."""

    def __init__(self, order: Order, group: str, trace: RolloutTrace, changes: WorkerChanges) -> None:
        super().__init__(NextRollout(RolloutKey(group, order.number), order.engine, order.cap_tokens), EngineLoads(1))
        self._uid, self._trace, self._changes = order.uid, trace, changes
        self._noted: tuple[str | None, int] = (order.engine, order.attempt)

    def move(self, url: str | None) -> None:
        """Record that the rollout now runs on this engine, or on none."""
        place = (url, self._trace.num_attempts - 1)
        if self._noted != place:
            self._noted = place
            self._changes.note_moved(self._uid, *place)


@dataclass
class MemberRollout:
    """A rollout that this worker runs, or whose samples wait here for a slot."""

    order: Order
    group: OpenGroup
    trace: RolloutTrace
    rollout_slot: MemberSlot
    samples: list[Sample] = field(default_factory=list)
    is_running: bool = True
    judged: "asyncio.Future[None] | None" = None
    """Set once its samples have a slot; done when they are on the buffer's disk or refused."""

    @property
    def executions(self) -> Sequence[Execution]:
        """Attempts of the rollout in this worker."""
        return self.group.rollouts.get(self.order.number, ())

    def done(self, status: str) -> Done:
        """The message to the lead about its end."""
        executions = self.executions
        is_completed = bool(executions) and status == "completed"
        return Done(
            status=status,  # type: ignore[arg-type]
            tokens=[each.num_sampled_tokens for each in executions],
            counters=dict(executions[-1].trajectory.counters) if is_completed else {},
            error=self.samples[-1]["error"]["message"] if status == "failed" else "",
        )


def begin_rollout(
    order: Order, plan: Plan, traces: RolloutTraces, clock: ActiveClock, hold: StepBarrier, changes: WorkerChanges
) -> MemberRollout:
    """Begin the rollout that the lead requests. Its time limits count from the lead's start."""
    row = parse_row(order.row, order.row_number)
    planned = GroupPlan(row, order.epoch, (order.number,), (order.number,))
    # Both limits of a group count from its beginning, so the time left is converted to an age.
    age_s = max(0.0, plan.group_deadline_s - order.left_s)
    group = OpenGroup(plan, planned, clock, hold, age_s=age_s)
    group.enter()
    now = traces.tracer.now()
    waits = QueueWait(traces.tracer)
    waits.begun = now - order.lasted
    trace = traces.begin(planned, order.number, hold.step, waits, order.attempt)
    trace.attempt.know_as(order.span)
    for name, after, lasted in order.waits:
        trace.attempt.add(name, now - order.lasted + after, lasted)
    return MemberRollout(order, group, trace, MemberSlot(order, planned.group_id, trace, changes))


class MemberJob:
    """Runs the ordered rollouts and delivers the samples that get a slot. Used in the event loop of the user's code."""

    def __init__(self, plan: Plan, parts: MemberParts, changes: WorkerChanges, *, defers_groups: bool = False) -> None:
        self._plan, self._parts, self._changes = plan, parts, changes
        self._wait_name = "group" if defers_groups else "write"
        """The phase of a finished rollout until its samples get a slot."""
        self._clock = ActiveClock(SystemClock())
        self._hold = StepBarrier(clock=self._clock, engine_wait_s=parts.engine_wait_s)
        self._rollouts: dict[str, MemberRollout] = {}
        self._calls: set[asyncio.Task[object]] = set()
        """Tasks of ``rollout`` that have not returned."""
        self._tasks = TaskSet()
        parts.traces.on_end = self._note_over
        parts.pool.on_server = changes.note_server

    async def run(self, state: JobState, ended: "Future[Any]") -> None:
        """Accept rollouts until the lead ends the job."""
        self._follow(state)
        watching = self._tasks.start(self._watch_writer())
        await asyncio.wrap_future(ended)
        watching.cancel()
        for rollout in self._rollouts.values():
            rollout.group.close()
        if self._calls:
            await asyncio.wait(self._calls)
        self._parts.traces.close()
        await self._tasks.cancel()

    async def _watch_writer(self) -> None:
        try:
            await self._parts.writer.watch()
        except Exception as error:  # noqa: BLE001 - the lead ends the job, and with it this worker
            self._changes.note_failure(f"{type(error).__name__}: {error}", is_gone=isinstance(error, RunGone))

    async def set_state(self, state: JobState) -> None:
        """Apply a new state of the run."""
        self._follow(state)

    def _follow(self, state: JobState) -> None:
        # Before the hold ends, so that the calls released by it carry the new version.
        self._parts.pool.announce(state.weights)
        self._clock.run(state.is_clock_running)
        self._hold.follow(is_held=state.is_held, is_paused=state.is_paused, number=state.step)

    # --- one rollout

    async def rollout(self, order: Order) -> Done:
        """Run one rollout to its end. Cancelling it aborts its engine calls."""
        rollout = begin_rollout(order, self._plan, self._parts.traces, self._clock, self._hold, self._changes)
        self._rollouts[order.uid] = rollout
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            status = await self._status(rollout, task)
        except BaseException:
            self._end_calls(rollout)
            rollout.trace.end()
            raise
        finally:
            rollout.is_running = False
            self._calls.discard(task)
        done = rollout.done(status)
        if not rollout.samples:
            rollout.trace.end(is_last=status != "broken")
            return done
        waiting = rollout.trace.wait(self._wait_name)
        if self._hold.is_held:  # it might fill a group that the step does not need
            self._tasks.start(self._wait_held(rollout, waiting))
        return done

    async def _wait_held(self, rollout: MemberRollout, waiting: SpanHandle) -> None:
        with rollout.trace.attempt.begin("hold", up=waiting):
            await self._hold.wait()

    async def _status(self, rollout: MemberRollout, task: "asyncio.Task[object]") -> str:
        group = rollout.group
        try:
            with group.working():
                samples = await self._parts.runner.samples(
                    group, rollout.order.number, rollout.trace, rollout.rollout_slot
                )
        except RolloutBroken:
            rollout.trace.ending = "broken"
            return "broken"
        except GroupClosed:
            return "closed"
        except asyncio.CancelledError:
            # A closed group cancels its task once; any further cancellation means the call itself.
            if not group.is_closed or task.uncancel():
                raise
            return "closed"
        except Exception as error:  # noqa: BLE001 - only this rollout failed: the worker runs others
            unbegun = Unbegun(group.plan, rollout.order.uid, rollout.order.number, 0, rollout.trace.num_attempts - 1)
            samples = [failed_sample(unbegun, error, outcome_of(error))]
        rollout.samples = samples
        return str(samples[-1]["status"])

    async def deliver(self, uid: str, slot: int) -> None:
        """Send the samples of a rollout to their slot. Returns once the buffer has stored or refused them."""
        rollout = self._rollouts.get(uid)
        if rollout is None:
            return
        trace, samples, rollout.samples = rollout.trace, rollout.samples, []
        rollout.judged = judged = asyncio.get_running_loop().create_future()
        trace.ending = "failed" if samples[-1]["status"] == "failed" else "finished"
        trace.slot = slot
        trace.write(samples[-1])
        for sample in samples if self._parts.takes_failed else samples[-1:]:
            await self._parts.writer.write({**sample, "slot": slot})
        await judged

    async def drop(self, uid: str, ending: str) -> None:
        """Discard a rollout or its sample, which is not needed."""
        rollout = self._rollouts.get(uid)
        if rollout is None or rollout.judged is not None:
            return
        rollout.trace.ending = "failed" if ending == "failed" else "aborted"
        if rollout.is_running:
            self._end_calls(rollout)
        else:
            rollout.trace.end()

    def _end_calls(self, rollout: MemberRollout) -> None:
        calls = rollout.group.calls()  # before closing: cancelled tasks forget their calls
        rollout.group.close()
        for url, rid in calls:
            self._tasks.start(self._parts.pool.abandon(url, rid))

    async def stop(self, uids: list[str], *, are_over: bool) -> dict[str, int]:
        """Have the engines end the calls of these rollouts; returns the tokens that each has sampled by then.

        ``are_over``: the rollouts are not needed any more; their streams end too, and they send no further call.
        Otherwise only calls answered in one piece end, while the run waits for its next step (``is_held``).
        """
        rollouts = [self._rollouts[uid] for uid in uids if uid in self._rollouts]
        if are_over:
            for rollout in rollouts:
                rollout.group.shut()
            await self._parts.pool.stop(lambda: [call for each in rollouts for call in each.group.calls()])
        else:
            await self._parts.pool.stop(lambda: self._whole_calls(rollouts), limit_s=None)
        return {each.order.uid: each.executions[-1].num_sampled_tokens for each in rollouts if each.executions}

    def _whole_calls(self, rollouts: list[MemberRollout]) -> list[tuple[str, str]]:
        held = rollouts if self._hold.is_held else ()
        return [call for each in held for call in each.group.whole_calls()]

    def _note_over(self, trace: RolloutTrace) -> None:
        rollout = self._rollouts.pop(trace.uid, None)
        if rollout is not None and rollout.judged is not None and not rollout.judged.done():
            rollout.judged.set_result(None)
