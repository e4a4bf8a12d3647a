"""A run as the gateway knows it: its engines, its way to the server, and the rollouts that it opened."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from forebay.core.clock import ActiveClock, SystemClock
from forebay.engines.capture.fill_gaps import weight_version_of
from forebay.engines.ring import EngineRing
from forebay.gateway.engine_http import Answer, Upstream
from forebay.gateway.request_bodies import RegisterRun
from forebay.gateway.runs.buffer_link import BufferLink
from forebay.gateway.runs.closed_rollouts import ClosedRollouts
from forebay.gateway.runs.foreign_runs import Captured
from forebay.gateway.runs.rollout import OpenedRollout
from forebay.gateway.runs.sessions import Session
from forebay.gateway.runs.worker_versions import WorkerVersions

logger = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.3
"""An abort can miss a request that is on its way to the scheduler."""
REPORT_S = 0.5
"""Counts are told so long after they have changed."""
TIMED_OUT = "timed_out"

Result = TypeVar("Result")


class GatewayRun:
    """Enter it with ``async with``. Sessions must have ended before it is left."""

    def __init__(self, run_id: str, told: RegisterRun) -> None:
        self.run_id = run_id
        self.told = told
        self.rollouts: dict[str, OpenedRollout] = {}
        self.ring = EngineRing(told.engine_urls, api_key=told.api_key, model=told.model, on_waiting=self.note_waiting)
        self.upstream = Upstream(told.api_key)
        self.versions = WorkerVersions(partial(weight_version_of, self.upstream.http))
        self.clock = ActiveClock(SystemClock())
        """What deadlines count by: it stands still while those of the run do."""
        self.clock.run(True)
        self.captured = Captured(run_id, told.capturing, self.ring, self.clock) if told.capturing is not None else None
        self.closed = ClosedRollouts()
        self._buffer = BufferLink(told.buffer_url)
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reporting: asyncio.TimerHandle | None = None
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        for part in (self.ring, self.upstream, self._buffer):
            await self._stack.enter_async_context(part)
        if self.captured is not None:
            await self.captured.open()
        self._following = asyncio.create_task(self._follow(), name=f"follow {self.run_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._following is not None
        self._following.cancel()
        await asyncio.wait([self._following])
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._stack.aclose()

    @property
    def sessions(self) -> list[Session]:
        """Those that are not over."""
        captured = self.captured.sessions if self.captured is not None else ()
        return [*(rollout.session for rollout in self.rollouts.values()), *captured]

    def abandon(self, engine_url: str, rid: str) -> None:
        """Nobody waits for a request any more: have its engine stop, in the background."""
        self._in_background(self._abort(engine_url, rid))

    def end(self, session: Session, reason: str) -> None:
        """End the calls of a session, and have the engines stop whatever has its prefix."""
        if session.is_busy:
            self._in_background(self.ring.abort(session.rid_prefix))
        session.close(reason)

    def settle(self, rollout: OpenedRollout) -> None:
        """A rollout was ended: what it tells once its last call is recorded is kept for those who ask."""
        self.closed.add(rollout.rollout_id, self._in_background(rollout.last_word()))

    async def write(self, content: bytes) -> Answer:
        """Pass a sample on, with its tokens if they were recorded."""
        assert self.captured is not None
        await self.captured.settled()
        content = self.captured.completed(content)
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().call_later(REPORT_S, self._report)
        return await self._buffer.write(content)

    # --- what the server tells, and is told

    async def _follow(self) -> None:
        """Note new policies and standstills; end the calls of groups that were closed without all their samples."""
        before: dict[str, Any] | None = None
        while (told := await self._buffer.news(before)) is not None:
            self.ring.weight_version = told["step"]["weight_version"]
            self._note_still(told["still"])
            for group in told["groups"] if before else ():  # what was closed before has no calls
                self._end_group(group)
            before = told

    def _note_still(self, is_still: bool) -> None:
        """The run's deadlines stand still, or count: those of its sessions as well."""
        if is_still == self.clock.is_running:
            self.clock.run(not is_still)
            for session in self.sessions:
                session.note_clock()

    def _end_group(self, group: dict[str, Any]) -> None:
        if self.captured is not None and (group["reason"] == TIMED_OUT or group["is_salvaged"]):
            self._in_background(self.captured.end_group(group["instance_id"]))

    def note_waiting(self, is_waiting: bool) -> None:
        """Tell the server whether all engines are away: deadlines stand still as long as nobody can work."""
        self._in_background(self._buffer.report(waiting_for_engine=is_waiting))

    def _report(self) -> None:
        self._reporting = None
        if self.captured is not None:
            self._in_background(self._buffer.report(counts=self.captured.counts))

    async def _abort(self, engine_url: str, rid: str) -> None:
        await self.ring.abandon(engine_url, rid)
        await asyncio.sleep(ABORT_AGAIN_S)
        await self.ring.abandon(engine_url, rid)

    def _in_background(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
