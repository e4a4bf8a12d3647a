"""The lead's handle of one worker of a run."""

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
    """One worker until it is gone. Each job may use another event loop."""

    def __init__(self, number: int, num_restarts: int = 0, reason: str = "") -> None:
        self.number, self.num_restarts = number, num_restarts
        self.state: Literal["unplaced", "starting", "ready", "lost"] = "starting"
        self.rollouts: set[str] = set()
        """Uids of the rollouts in flight."""
        self.reserved_for: str | None = None
        """The rollout that runs, or will run, alone in it."""
        self.reason = reason
        """Why the cluster has no room for it, or why its predecessor is gone."""
        self.last_report: WorkerStatus | None = None
        self.waits_for_engine = False
        """The state that the job's reporter has."""
        self.num_passed = 0
        """Number of jobs whose end was sent to it."""
        self._running: RunningWorker | None = None
        self._returned: Future[bytes] = Future()
        self._trace = ReceivedTrace()

    @property
    def is_started(self) -> bool:
        """Whether its process runs or is being started."""
        return self._running is not None

    def begin(self, running: RunningWorker) -> None:
        """Attach the started process; calls wait until it is up."""
        self._running = running
        self._returned = running.call(MethodCall(ROLE, "returned"))
        self._returned.add_done_callback(self._note_returned)

    def end(self) -> None:
        """Detach the process, which did not come up, so that another can be started."""
        self._running = None

    async def when_started(self) -> None:
        """Wait until it is up. Raises the error of a failed start."""
        assert self._running is not None
        await awaited(self._running.started)

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """Call a method of ``RolloutWorker``. The call continues in the worker when its caller is cancelled.

        Raises the call's error, usually that the process is gone.
        """
        return awaited(self.send(method, *args))

    def send(self, method: str, *args: Any) -> "Future[Any]":
        """Like ``call``, without waiting."""
        assert self._running is not None
        return self._running.call(MethodCall(ROLE, method, args))

    async def report(self) -> WorkerStatus:
        """Request its status. The trace in the report is written even if the caller is cancelled."""
        report: Future[WorkerStatus] = Future()
        self.send("report").add_done_callback(partial(self._take_report, report))
        self.last_report = await awaited(report)
        return self.last_report

    async def watch(self) -> None:
        """Wait until its ``run_rollout`` or its process ends, and raise the reason."""
        trace, _ = decode(await awaited(self._returned), tuple[str, list[TraceLines]])
        raise RuntimeError(trace or "its run_rollout has returned while the job is still running")

    def close(self, drain_s: float) -> None:
        """End it once its ``run_rollout`` has returned, or after ``drain_s``."""
        if self._running is not None:
            wait([self._returned], drain_s)
            self._running.close(0.0)

    def kill(self) -> None:
        """End it at once."""
        if self._running is not None:
            self._running.kill()

    def state_report(self) -> WorkerReport:
        """Report on the worker for the server."""
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
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            report.set_exception(error)
        else:
            report.set_result(status)

    def _note_returned(self, ended: "Future[bytes]") -> None:
        if not ended.cancelled() and ended.exception() is None:
            for lines in decode(ended.result(), tuple[str, list[TraceLines]])[1]:
                self._trace.append(lines)
        self._trace.close()


async def awaited(future: "Future[Any]") -> Any:
    """Result of another thread's future, which keeps running if the caller is cancelled or its loop is closed."""
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
