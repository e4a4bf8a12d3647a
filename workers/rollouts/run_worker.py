"""One worker of a run, as its lead has it."""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from forebay.generators.buffer_link.abc import WorkerReport
from forebay.workers.backends.abc import MethodCall, RunningWorker
from forebay.workers.rollouts.orders import TraceLines, WorkerStatus, decode
from forebay.workers.rollouts.remote_traces import ReceivedTrace

ROLE = ""


class RunWorker:
    """One worker, until it is gone. Its jobs may have event loops of their own."""

    def __init__(self, number: int, num_restarts: int = 0, reason: str = "") -> None:
        self.number, self.num_restarts = number, num_restarts
        self.state: Literal["unplaced", "starting", "ready", "lost"] = "starting"
        self.rollouts: set[str] = set()
        """Those in flight, by uid."""
        self.reserved_for: str | None = None
        """The rollout that runs alone in it."""
        self.reason = reason
        """Why it has no place, or why the one before it is gone."""
        self.last_report: WorkerStatus | None = None
        self.waits_for_engine = False
        """As its job has taken note of."""
        self.num_passed = 0
        """Jobs whose end it has been told."""
        self._running: RunningWorker | None = None
        self._returned: Future[bytes] = Future()
        self._trace = ReceivedTrace()

    @property
    def is_started(self) -> bool:
        """Whether there is a process, or one on its way."""
        return self._running is not None

    def begin(self, running: RunningWorker) -> None:
        """It was started; calls wait until it has come up."""
        self._running = running
        self._returned = running.call(MethodCall(ROLE, "returned"))
        self._returned.add_done_callback(self._note_returned)

    def end(self) -> None:
        """It has not come up: another one may be started."""
        self._running = None

    async def when_started(self) -> None:
        """Return when it has come up. Raises why it has not."""
        assert self._running is not None
        await awaited(self._running.started)

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """Call one of the methods of ``RolloutWorker``; the call goes on there when its caller is cancelled.

        Raises whatever keeps it from returning: the process is gone, as a rule.
        """
        return awaited(self.send(method, *args))

    def send(self, method: str, *args: Any) -> "Future[Any]":
        """``call``, for a caller that does not wait."""
        assert self._running is not None
        return self._running.call(MethodCall(ROLE, method, args))

    async def report(self) -> WorkerStatus:
        """Ask how it is. The trace that comes with it is written, whether or not the caller still waits."""
        report: Future[WorkerStatus] = Future()
        self.send("report").add_done_callback(partial(self._take_report, report))
        self.last_report = await awaited(report)
        return self.last_report

    async def watch(self) -> None:
        """Raise why it cannot go on, when its ``run_rollout`` has ended, or its process."""
        trace, _ = decode(await awaited(self._returned), tuple[str, list[TraceLines]])
        raise RuntimeError(trace or "its run_rollout has returned while the job goes on")

    def close(self, drain_s: float) -> None:
        """End it once its ``run_rollout`` has returned, or ``drain_s`` are over."""
        if self._running is not None:
            wait([self._returned], drain_s)
            self._running.close(0.0)

    def kill(self) -> None:
        """End it at once."""
        if self._running is not None:
            self._running.kill()

    def state_report(self) -> WorkerReport:
        """How it is, for the server."""
        vitals, report = self._running.vitals if self._running is not None else None, self.last_report
        return WorkerReport(
            number=self.number,
            node=vitals.node if vitals is not None else "",
            state=self.state,
            num_in_flight=len(self.rollouts),
            num_restarts=self.num_restarts,
            rss_bytes=vitals.rss_bytes if vitals is not None else 0,
            blocked_s=round(report.blocked_s, 1) if report is not None else 0.0,
            blocked_at=report.blocked_at if report is not None else "",
            reason=self.reason,
        )

    def _take_report(self, report: "Future[WorkerStatus]", ended: "Future[bytes]") -> None:
        try:
            status = decode(ended.result(), WorkerStatus)
            for lines in status.trace:
                self._trace.append(lines)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            report.set_exception(error)
        else:
            report.set_result(status)

    def _note_returned(self, ended: "Future[bytes]") -> None:
        if not ended.cancelled() and ended.exception() is None:
            for lines in decode(ended.result(), tuple[str, list[TraceLines]])[1]:
                self._trace.append(lines)
        self._trace.close()


async def awaited(future: "Future[Any]") -> Any:
    """The result of a future of another thread, which goes on when the caller is cancelled, or its loop is closed."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not ended.done():
            ended.set_result(None)

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve)

    future.add_done_callback(wake)
    await ended
    return future.result()
