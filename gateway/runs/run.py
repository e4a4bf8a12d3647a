"""A run as the gateway knows it: its engines, its way to the server, and the rollouts that it opened."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Self

from forebay.client.calls.flow import ServerReply
from forebay.core.clock import ActiveClock, SystemClock
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
"""An abort can miss a request that is on its way to the scheduler."""
REPORT_S = 0.5
"""Counts are reported so long after they have changed."""
TIMED_OUT = "timed_out"


class GatewayRun:
    """Enter it with ``async with``. Sessions must have ended before it is left."""

    def __init__(self, run_id: str, registration: RegisterRun, watch: StallWatch) -> None:
        self.run_id = run_id
        self.registration = registration
        self.rollouts: dict[str, OpenedRollout] = {}
        """The open ones, by id."""
        self.closed = ClosedRollouts()
        self.capped = CappedRollouts()
        self.pool = EnginePool(
            registration.engine_urls,
            api_key=registration.api_key,
            model=registration.model,
            on_waiting=self.report_waiting,
            policy_models=registration.policy_models,
        )
        self.engine_http = EngineHttp(registration.api_key)
        self.versions = WorkerVersions(self.pool.weights_at)
        self.clock = ActiveClock(SystemClock())
        """What deadlines count by: it stops while those of the run do."""
        self.clock.run(True)
        self.trace = GatewayTrace(run_id, registration.trace, self.pool, watch)
        capturing = registration.capturing
        self.captured_calls = (
            None if capturing is None else RunCalls(run_id, capturing, self.pool, self.clock, self.trace)
        )
        self.tasks = TaskSet()
        """What goes on beside the calls: aborts, reports, records that are being closed."""
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
        await asyncio.wait([self._following])  # it starts tasks: it ends before they are waited for
        self.report_now()
        await self.tasks.drain()  # before the connections go: aborts are sent over them
        await self._stack.aclose()

    @property
    def sessions(self) -> list[Session]:
        """Those that are not over."""
        captured = self.captured_calls.sessions if self.captured_calls is not None else ()
        return [*(rollout.session for rollout in self.rollouts.values()), *captured]

    def abandon(self, engine_url: str, rid: str) -> None:
        """Nobody waits for a request any more: have its engine stop, in the background."""
        self.tasks.start(self._abort(engine_url, rid))

    async def _abort(self, engine_url: str, rid: str) -> None:
        await self.pool.abandon(engine_url, rid)
        await asyncio.sleep(ABORT_AGAIN_S)
        await self.pool.abandon(engine_url, rid)

    def end(self, session: Session, reason: str) -> None:
        """End the calls of a session, and have the engines stop whatever has its prefix."""
        if session.is_busy:
            self.tasks.start(self.pool.abort(session.rid_prefix))
        session.close(reason)

    async def write(self, content: bytes, writer: str) -> ServerReply:
        """Pass a sample of a captured generator on, with its tokens if they were recorded.

        ``writer`` is what its writer said of itself (``WRITER_HEADER``).
        """
        assert self.captured_calls is not None
        # A stream's last tokens may be looked up yet, while the generator that read it writes its sample already.
        await self.captured_calls.drain()
        content, rollout = self.captured_calls.completed(content)
        self._report_soon()
        reply = await self._buffer.write(content, writer)
        if rollout is not None:
            rollout.written(reply)
        return reply

    # --- news from the server, and reports to it

    async def _follow(self) -> None:
        """Note new policies and standstills; end the calls of groups that were closed without all their samples."""
        before: dict[str, Any] | None = None
        while (news := await self._buffer.news(before)) is not None:
            self.pool.announce(AnnouncedWeights(**news["step"]["weights"]))
            self.trace.step = news["step"]["number"]
            self.trace.calls.note_paused(news["paused"])
            self._run_clock(not news["still"])
            for group in news["groups"] if before else ():  # what was closed before has no calls
                if self.captured_calls is not None and (group["reason"] == TIMED_OUT or group["is_salvaged"]):
                    self.tasks.start(self.captured_calls.end_group(group["instance_id"]))
            before = news

    def _run_clock(self, is_running: bool) -> None:
        """The run's deadlines count, or do not: those of the calls in flight as well."""
        if is_running != self.clock.is_running:
            self.clock.run(is_running)
            for session in self.sessions:
                session.note_clock()

    def report_waiting(self, is_waiting: bool) -> None:
        """Report whether all engines are away: deadlines do not count as long as nobody can work."""
        self.tasks.start(self._buffer.report(waiting_for_engine=is_waiting))

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().call_later(REPORT_S, self._report_counts)

    def report_now(self) -> None:
        """Report what was counted since the last time, if anything was: the run may end any moment."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._report_counts()

    def _report_counts(self) -> None:
        # Cleared first: what is counted from here on starts the next report.
        self._reporting = None
        self.tasks.start(self._send_counts())

    async def _send_counts(self) -> None:
        # One after the other: of two reports the older one must not come last.
        async with self._one_report:
            matched = self.captured_calls.counts if self.captured_calls is not None else {}
            await self._buffer.report(counts={**matched, **self.notes.counts})
