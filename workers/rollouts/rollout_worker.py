"""One worker of a run: calls the user's ``run_rollout`` in a thread. Its jobs run the rollouts that the lead requests.

The methods of ``RolloutWorker`` run in the worker's event loop; they call the job in the event loop of user code.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from forebay.generators.buffer_link.abc import Plan
from forebay.generators.job.composition import Composition, compose_here
from forebay.generators.job.ports import MemberShare, OpenMember
from forebay.generators.job.reporter import Totals
from forebay.generators.process.main import call_run_rollout, set_up_output
from forebay.generators.process.spec import RunSpec
from forebay.telemetry.tracing.stall_watch import StallWatch
from forebay.telemetry.tracing.tracer import TraceSettings, run_tracer, start_tracing
from forebay.workers.members.worker import Worker
from forebay.workers.members.worker_errors import WorkerError
from forebay.workers.rollouts.member_job import MemberJob, WorkerChanges
from forebay.workers.rollouts.orders import JobOrder, JobState, Order, decode, encode
from forebay.workers.rollouts.other_nodes import Address, has_code, out_of_reach, unpacked
from forebay.workers.rollouts.remote_traces import SentTrace

T = TypeVar("T")

BLOCKED_S = 5.0
"""Shortest blocking of the event loop that is reported."""


class _Running(NamedTuple):
    """The current job of this worker, in the event loop of the user's code."""

    job: MemberJob
    loop: asyncio.AbstractEventLoop
    watch: StallWatch


class _Passage:
    """Progress of the lead in one job of ``run_rollout``. Futures are resolved in one thread, awaited in another."""

    def __init__(self) -> None:
        self.begun: Future[JobOrder | None] = Future()
        """None: the job was over before this worker reached it."""
        self.ready: Future[list[Address]] = Future()
        self.ended: Future[dict[str, Any] | None] = Future()
        for each in (self.begun, self.ready, self.ended):
            each.set_running_or_notify_cancel()  # so that a cancelled caller cannot cancel them


class RolloutWorker(Worker):
    """Worker of the run of ``spec``. It loads the run's copy of the generator, so no user object is pickled."""

    def __init__(self, spec: dict[str, Any], code: bytes = b"") -> None:
        """``code``: the run's packed copy, for a machine that lacks it."""
        self._spec, self._code = RunSpec(**spec), code
        self._changes = WorkerChanges()
        self._passages: dict[int, _Passage] = {}
        self._num_served = 0
        self._running: _Running | None = None
        self._returned: Future[str] = Future()
        self._returned.set_running_or_notify_cancel()
        threading.Thread(target=self._run, name=f"run_rollout {self.rank}", daemon=True).start()

    # --- called by the lead

    async def returned(self) -> bytes:
        """Wait for ``run_rollout``. Returns the traceback of its error, or "", and the rest of the trace."""
        trace = await asyncio.wrap_future(self._returned)
        return encode((trace, self._changes.take().trace))

    async def begin_job(self, order: bytes) -> list[Address]:
        """Take rollouts of a job once the user's code reaches it. Returns the addresses out of reach."""
        job = decode(order, JobOrder)
        passage = self._passage(job.number)
        passage.begun.set_result(job)
        return await asyncio.wrap_future(passage.ready)

    async def end_job(self, number: int, totals: dict[str, Any] | None) -> None:
        """End a job with these totals. None: the job has failed, which ends the worker."""
        passage = self._passage(number)
        passage.ended.set_result(totals)
        if not passage.begun.done():
            passage.begun.set_result(None)

    async def rollout(self, order: bytes) -> bytes:
        """Run one rollout; its samples wait here. Cancelling it aborts its engine calls."""
        given = decode(order, Order)
        return encode(await self._in_job(lambda job: job.rollout(given)))

    async def deliver(self, uid: str, slot: int) -> None:
        """Send the samples of a rollout to their slot. Returns once the buffer has stored or refused them."""
        await self._in_job(lambda job: job.deliver(uid, slot))

    async def drop(self, uid: str, ending: str) -> None:
        """Discard a rollout or its sample, which is not needed. Ends it if it still runs."""
        await self._in_job(lambda job: job.drop(uid, ending))

    async def stop(self, uids: list[str], are_over: bool) -> dict[str, int]:
        """End the engine calls of these rollouts. Returns the tokens that each has sampled by then."""
        return await self._in_job(lambda job: job.stop(uids, are_over=are_over))

    async def set_state(self, state: bytes) -> None:
        """Apply a new state of the run."""
        given = decode(state, JobState)
        await self._in_job(lambda job: job.set_state(given))

    async def report(self) -> bytes:
        """Status of this worker. Does not need the user's event loop, which may be blocked."""
        report = self._changes.take()
        if (running := self._running) is not None:
            blocked_s, line = running.watch.blocked()
            if blocked_s >= BLOCKED_S:
                report.blocked_s, report.blocked_at = blocked_s, line
        return encode(report)

    async def _in_job(self, work: Callable[[MemberJob], Coroutine[Any, Any, T]]) -> T:
        running = self._running
        if running is None:
            raise WorkerError(f"worker {self.rank} has no running job")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(running.job), running.loop))

    def _passage(self, number: int) -> _Passage:
        return self._passages.setdefault(number, _Passage())

    # --- in the thread of the user's code

    async def serve(self, open_parts: OpenMember) -> Totals:
        """Serve the next job. Implements ``JobMember``; returns at once for a job that is already over."""
        passage, self._num_served = self._passage(self._num_served), self._num_served + 1
        order = await asyncio.wrap_future(passage.begun)
        if order is not None:
            await self._served(order, passage, open_parts)
        totals = await asyncio.wrap_future(passage.ended)
        if totals is None:
            raise WorkerError("the lead of this run has failed")
        return _totals_of(totals)

    async def _served(self, order: JobOrder, passage: _Passage, open_parts: OpenMember) -> None:
        plan = Plan(
            order.run_id, order.group_size, order.group_timeout_s, order.group_deadline_s, captures=order.captures
        )
        share = MemberShare(plan, order.queue_size, order.num_reward_workers, self.rank)
        unreached = await out_of_reach(order.addresses)
        loop = asyncio.get_running_loop()
        async with open_parts(share, self._changes.note_waiting) as parts:
            job = MemberJob(plan, parts, self._changes, defers_groups=order.defers_groups)
            self._running = _Running(job, loop, parts.watch)
            passage.ready.set_result(unreached)
            try:
                await job.run(order.state, passage.ended)
            finally:
                self._running = None

    def _call_run_rollout(self) -> None:
        if self._spec.backend != "inline":  # inline, the output belongs to the lead's process
            set_up_output()
        is_here = has_code(self._spec)
        if self._spec.trace is not None:
            trace = TraceSettings(**self._spec.trace)
            if is_here:
                start_tracing(trace, "run")
            else:
                start_tracing(trace, "run", lambda _, head: SentTrace(head, self._changes.note_trace))
        call_run_rollout(self._spec if is_here else unpacked(self._spec, self._code))

    def _run(self) -> None:
        compose_here(Composition(member=self))
        trace = ""
        try:
            self._call_run_rollout()
        except BaseException:  # noqa: BLE001 - user code may raise anything; the lead decides what follows
            trace = traceback.format_exc()
        run_tracer().flush()
        self._returned.set_result(trace)


def _totals_of(fields: dict[str, Any]) -> Totals:
    totals = Totals(**{name: value for name, value in fields.items() if name != "counts"})
    totals.counts.update(fields.get("counts", {}))
    return totals
