"""The gateway's state of a run: its engines, its connection to the server, and the rollouts that it opened."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Self

from forebay.client.calls.flow import ServerReply
from forebay.core.clock import ActiveClock, SystemClock
from forebay.core.starts.asked_arrays import AskedArrays
from forebay.core.tasks import TaskSet
from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.pool import EnginePool
from forebay.gateway.engine_http import EngineHttp
from forebay.gateway.request_bodies import RegisterRun
from forebay.gateway.runs.buffer_link import BufferLink
from forebay.gateway.runs.captured_run import RunCalls
from forebay.gateway.runs.notes import Notes
from forebay.gateway.runs.rollouts import CappedRollouts, ClosedRollouts, OpenedRollout
from forebay.gateway.runs.run_trace import GatewayTrace
from forebay.gateway.runs.sessions import Session
from forebay.gateway.runs.worker_versions import WorkerVersions
from forebay.telemetry.tracing.stall_watch import StallWatch

ABORT_AGAIN_S = 0.3
"""Pause before the second abort: the first can miss a request that is on its way to the scheduler."""
REPORT_S = 0.5
"""Delay between a change of counts and their report."""
TIMED_OUT = "timed_out"


class GatewayRun:
    """One run. Enter it with ``async with``, and end its sessions before leaving it."""

    def __init__(self, run_id: str, registration: RegisterRun, watch: StallWatch) -> None:
        self.run_id = run_id
        self.registration = registration
        self.rollouts: dict[str, OpenedRollout] = {}
        """Open rollouts, by id."""
        self.closed = ClosedRollouts()
        self.capped = CappedRollouts()
        self.pool = EnginePool(
            registration.engine_urls,
            api_key=registration.api_key,
            model=registration.model,
            on_waiting=self.report_waiting,
            policy_models=registration.policy_models,
            arrays=AskedArrays.parse(registration.arrays),
        )
        self.engine_http = EngineHttp(registration.api_key)
        self.versions = WorkerVersions(self.pool.weights_at)
        self.clock = ActiveClock(SystemClock())
        """Measures deadlines; it is paused while the run's deadlines are."""
        self.clock.run(True)
        self.trace = GatewayTrace(run_id, registration.trace, self.pool, watch)
        capturing = registration.capturing
        self.captured_calls = (
            None if capturing is None else RunCalls(run_id, capturing, self.pool, self.clock, self.trace)
        )
        self.tasks = TaskSet()
        """Background tasks: aborts, reports, and records of closing rollouts."""
        self.notes = Notes(run_id, self._report_soon)
        self._buffer = BufferLink(registration.buffer_url)
        self._stack = AsyncExitStack()
        self._reporting: asyncio.TimerHandle | None = None
        self._one_report = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        for part in (self.pool, self.engine_http, self._buffer):
            await self._stack.enter_async_context(part)
        if self.captured_calls is not None:
            await self.captured_calls.open()
        self._following = asyncio.create_task(self._follow(), name=f"follow {self.run_id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._following is not None
        self._following.cancel()
        await asyncio.wait([self._following])  # it starts tasks, so it must end before they are awaited
        self.report_now()
        await self.tasks.drain()  # before the connections are closed, because aborts use them
        await self._stack.aclose()

    @property
    def sessions(self) -> list[Session]:
        """Sessions that are not over."""
        captured = self.captured_calls.sessions if self.captured_calls is not None else ()
        return [*(rollout.session for rollout in self.rollouts.values()), *captured]

    def abandon(self, engine_url: str, rid: str) -> None:
        """Abort a request in the background, because its client is gone."""
        self.tasks.start(self._abort(engine_url, rid))

    async def _abort(self, engine_url: str, rid: str) -> None:
        await self.pool.abandon(engine_url, rid)
        await asyncio.sleep(ABORT_AGAIN_S)
        await self.pool.abandon(engine_url, rid)

    def end(self, session: Session, reason: str) -> None:
        """End the calls of a session, and abort everything with its prefix at the engines."""
        if session.is_busy:
            self.tasks.start(self.pool.abort(session.rid_prefix))
        session.close(reason)

    async def write(self, content: bytes, writer: str) -> ServerReply:
        """Forward a sample of a captured generator to the server, with its tokens if they were recorded.

        ``writer`` is the writer's ``WRITER_HEADER``.
        """
        assert self.captured_calls is not None
        # A stream's last tokens may still be looked up while the generator that read it already writes its sample.
        await self.captured_calls.drain()
        content, rollout = self.captured_calls.completed(content)
        self._report_soon()
        reply = await self._buffer.write(content, writer)
        if rollout is not None:
            rollout.written(reply)
        return reply

    # --- updates from the server, and reports to it

    async def _follow(self) -> None:
        """Record new weights and pauses, and end the calls of groups that were closed without all their samples."""
        before: dict[str, Any] | None = None
        while (update := await self._buffer.news(before)) is not None:
            self.pool.announce(AnnouncedWeights(**update["step"]["weights"]))
            self.trace.step = update["step"]["number"]
            self.trace.calls.note_paused(update["paused"])
            self._run_clock(not update["still"])
            for group in update["groups"] if before else ():  # groups closed before the first update have no calls
                if self.captured_calls is not None and (group["reason"] == TIMED_OUT or group["is_salvaged"]):
                    self.tasks.start(self.captured_calls.end_group(group["instance_id"]))
            before = update

    def _run_clock(self, is_running: bool) -> None:
        """Pause or resume the run's deadlines, including those of calls in flight."""
        if is_running != self.clock.is_running:
            self.clock.run(is_running)
            for session in self.sessions:
                session.note_clock()

    def report_waiting(self, is_waiting: bool) -> None:
        """Report whether all engines are unreachable: deadlines are paused while they are."""
        self.tasks.start(self._buffer.report(waiting_for_engine=is_waiting))

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().call_later(REPORT_S, self._report_counts)

    def report_now(self) -> None:
        """Report new counts at once, if there are any, because the run may end at any moment."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._report_counts()

    def _report_counts(self) -> None:
        # Cleared first, so that counts from now on start the next report.
        self._reporting = None
        self.tasks.start(self._send_counts())

    async def _send_counts(self) -> None:
        # One at a time: an older report must not arrive after a newer one.
        async with self._one_report:
            matched = self.captured_calls.counts if self.captured_calls is not None else {}
            await self._buffer.report(counts={**matched, **self.notes.counts})
