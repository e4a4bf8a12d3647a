"""Supervises run processes: starts them, restarts them after a crash, stops them, and ends their engine calls."""

import asyncio
import logging
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from forebay.core.backoff import Backoff
from forebay.core.ids import run_rid_prefix
from forebay.core.run import DEFAULT_BACKEND
from forebay.generators.process.code_copy import copied_module
from forebay.generators.process.run_logs import log_path, read_tail
from forebay.generators.process.spec import Report, RunSpec
from forebay.server.runs.process import ProcessOutcome, RunProcess
from forebay.server.runs.records import RunRecords

logger = logging.getLogger(__name__)

OUTCOME_LOG_LINES = 50
LAST_ABORTS_S = 2.0
"""Time for engines to drop the calls of runs that end with the server; a hung engine must not delay it."""
restart_pauses = partial(Backoff, 1.0, 30.0, is_exact=True)
"""Pauses before a run's first restart, its second, and so on."""
AbortCalls = Callable[[str, str, float], Awaitable[object]]
"""Ends the calls of an engine (base URL) whose request ids have a prefix, within a time limit in seconds."""


class EngineAborts:
    """Aborts calls by a run's request-id prefix, in the background, on a best-effort basis.

    Each engine gets ``timeout_s`` per request, and is abandoned after twice that.
    """

    def __init__(self, timeout_s: float, abort_calls: AbortCalls | None = None) -> None:
        self._timeout_s = timeout_s
        self._abort_calls = abort_calls or _abort_prefix
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, run_id: str, engine_urls: Sequence[str]) -> None:
        """Start to abort the calls of ``run_id`` at every engine."""
        if engine_urls:
            task = asyncio.create_task(self._abort_all(run_id, engine_urls), name=f"abort {run_id}")
            self._tasks[run_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(run_id, None))

    async def wait_for(self, run_id: str) -> None:
        """Return when no abort for ``run_id`` is under way; new calls of the run are safe then."""
        if run_id in self._tasks:
            await asyncio.shield(self._tasks[run_id])

    async def wait_for_all(self, limit_s: float) -> None:
        """Return when no abort is under way; cancel those left after ``limit_s`` seconds."""
        if tasks := list(self._tasks.values()):
            _, left = await asyncio.wait(tasks, timeout=limit_s)
            for task in left:
                task.cancel()

    async def _abort_all(self, run_id: str, engine_urls: Sequence[str]) -> None:
        prefix = run_rid_prefix(run_id)
        await asyncio.gather(*(self._abort_one(url, prefix) for url in engine_urls))

    async def _abort_one(self, url: str, prefix: str) -> None:
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await self._abort_calls(url, prefix, self._timeout_s)
        except Exception as error:  # noqa: BLE001 -- any kind of engine, perhaps gone; its calls have time limits
            logger.warning("calls %s* at %s could not be aborted: %r", prefix, url, error)


async def _abort_prefix(base_url: str, rid_prefix: str, timeout_s: float) -> object:
    from forebay.engines.aborts import abort_prefix

    return await abort_prefix(base_url, rid_prefix, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A run to start a process for. ``module_path`` is the user's file; the process uses its copy in ``run_dir``.

    The copy must be there (``RunFolders.copy_code``).
    """

    run_id: str
    module_path: Path
    run_dir: Path
    engine_urls: list[str] = field(default_factory=list)
    may_have_calls: bool = False
    """Whether a process from before a server restart may have left calls at the engines; they are aborted first."""
    workers: list[int] = field(default_factory=list)
    """Number of workers on each node; empty if the run process runs the rollouts itself."""
    backend: str = DEFAULT_BACKEND


@dataclass(slots=True)
class _Supervised:
    spec: LaunchSpec
    grace_s: float
    pauses: Backoff
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    is_shutdown: bool = False
    num_attempts: int = 0
    task: "asyncio.Task[None] | None" = None


class Supervisor:
    """Runs one process per launched run. Leaving the context stops all of them without a note in ``records``.

    ``stop_grace_s`` is the time between SIGTERM and SIGKILL. Runs work in ``working_dir`` (default: this process's),
    with ``environment`` added to their environment. The newest ``max_log_bytes`` of each run's output are kept.
    """

    def __init__(
        self,
        records: RunRecords,
        *,
        max_restarts: int = 3,
        stop_grace_s: float = 4.0,
        restart_pauses: Callable[[], Backoff] = restart_pauses,
        abort_timeout_s: float = 5.0,
        working_dir: Path | None = None,
        abort_calls: AbortCalls | None = None,
        environment: Mapping[str, str] | None = None,
        max_engine_reply_bytes: int = 64 << 20,
        max_log_bytes: int = 32 << 20,
        cluster: Mapping[str, Any] | None = None,
    ) -> None:
        """``cluster`` has ``worker_silence_s``, ``ray_address`` and ``ray_namespace`` of the settings."""
        self._environment = dict(environment or {})
        self._max_engine_reply_bytes = max_engine_reply_bytes
        self._max_log_bytes = max_log_bytes
        self._cluster = dict(cluster or {})
        self._records = records
        self._max_restarts = max_restarts
        self._stop_grace_s = stop_grace_s
        self._restart_pauses = restart_pauses
        self._working_dir = working_dir or Path.cwd()
        self._aborts = EngineAborts(abort_timeout_s, abort_calls)
        self._runs: dict[str, _Supervised] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end_all()
        await self._aborts.wait_for_all(LAST_ABORTS_S)

    async def end_all(self) -> None:
        """End every process without a note in ``records``."""
        runs = list(self._runs.values())
        for run in runs:
            run.is_shutdown = True
            run.stopping.set()
        await asyncio.gather(*(run.task for run in runs if run.task))

    async def launch(self, spec: LaunchSpec) -> None:
        """Start and supervise a process of the run. Raises RuntimeError if the run has one already."""
        if spec.run_id in self._runs:
            raise RuntimeError(f"run {spec.run_id} has a process already: stop it first")
        run = self._runs[spec.run_id] = _Supervised(spec, self._stop_grace_s, self._restart_pauses())
        try:
            await self._aborts.wait_for(spec.run_id)
        except BaseException:  # cancelled: a run that never started is not kept
            del self._runs[spec.run_id]
            raise
        run.task = asyncio.create_task(self._supervise(run), name=f"supervise {spec.run_id}")

    async def stop(self, run_id: str, grace_s: float | None = None) -> None:
        """End the run's process and everything it forked, without a restart; does nothing without a process.

        ``grace_s`` replaces the usual time between SIGTERM and SIGKILL. Returns when the process has ended and this is
        stored; the engines are asked to drop its calls afterwards.
        """
        run = self._runs.get(run_id)
        if run is not None:
            run.grace_s = run.grace_s if grace_s is None else grace_s
            run.stopping.set()
            if run.task is not None:
                await asyncio.shield(run.task)

    def is_alive(self, run_id: str) -> bool:
        """Whether the run has a process, or will get one again after a crash."""
        return run_id in self._runs

    async def log_tail(self, run_dir: Path, num_lines: int = 100) -> list[str]:
        """The last lines that the processes of the run in ``run_dir`` printed."""
        return await asyncio.to_thread(read_tail, log_path(run_dir), num_lines)

    async def _supervise(self, run: _Supervised) -> None:
        try:
            outcome = await self._run_to_the_end(run)
        except Exception as error:  # the disk or the machine failed: this fails the run, and must not be lost
            logger.exception("run %s could not be kept running", run.spec.run_id)
            outcome = await self._failed(run, f"{type(error).__name__}: {error}", traceback.format_exc())
        # Aborts first: once the run may be launched again, its launch finds them under way and waits.
        self._aborts.start(run.spec.run_id, run.spec.engine_urls)
        del self._runs[run.spec.run_id]
        if run.is_shutdown:  # the run continues after the server restarts
            return
        try:
            await self._records.process_ended(run.spec.run_id, outcome)
        except Exception:  # this task is not awaited, so its error would be lost
            logger.exception("the end of run %s could not be recorded", run.spec.run_id)

    async def _run_to_the_end(self, run: _Supervised) -> ProcessOutcome:
        if run.spec.may_have_calls:
            await self._abort_calls(run.spec)
        while not run.stopping.is_set():
            run.num_attempts += 1
            report = await self._run_once(run)
            if report is None or run.stopping.is_set():
                break
            if report.is_returned:
                return ProcessOutcome("returned", run.num_attempts)
            if run.num_attempts > self._max_restarts or report.is_invalid_input:
                return await self._failed(run, _ending(report), report.traceback)
            await self._prepare_restart(run, report)
        return ProcessOutcome("stopped", run.num_attempts)

    async def _run_once(self, run: _Supervised) -> Report | None:
        """Run one process from start to end; None if the run was stopped before it started."""
        spec = run.spec
        payload = await self._records.launch_payload(spec.run_id)
        earlier = await self._records.earlier_traces(spec.run_id)
        if run.stopping.is_set():  # the payload may have taken a while: a gateway is started for it
            return None
        module_path = copied_module(spec.module_path, spec.run_dir)
        process = await RunProcess.start(
            RunSpec(
                str(module_path),
                str(spec.module_path.parent),
                payload,
                self._max_engine_reply_bytes,
                self._records.process_settings(spec.run_id),
                earlier,
                spec.workers,
                spec.backend,
                **self._cluster,
            ),
            run_dir=spec.run_dir,
            working_dir=self._working_dir,
            environment=self._environment,
            max_log_bytes=self._max_log_bytes,
        )
        ended = asyncio.create_task(process.wait())
        try:
            await self._records.process_started(spec.run_id, run.num_attempts)
            await _first_of(ended, run.stopping)
        finally:
            if not ended.done():  # a stop, or an error of `process_started`: no process is left behind
                await process.stop(run.grace_s)
            report = await ended
            is_well = report.is_returned or run.stopping.is_set()
            self._records.note_process(spec.run_id, "ended" if is_well else "failed")
        return report

    async def _prepare_restart(self, run: _Supervised, report: Report) -> None:
        pause_s = run.pauses.next_s()
        # The text of a generator's error may come from a model.
        why = "run_rollout raised (run.log has its traceback)" if report.error else _ending(report)
        logger.warning("run %s: %s; restart in %.1f s", run.spec.run_id, why, pause_s)
        await self._abort_calls(run.spec)
        try:
            async with asyncio.timeout(pause_s):
                await run.stopping.wait()  # a stop must not wait for the pause to end
        except TimeoutError:
            return

    async def _abort_calls(self, spec: LaunchSpec) -> None:
        """Abort calls before the next process starts: its request ids begin alike, and engines refuse known ids."""
        self._aborts.start(spec.run_id, spec.engine_urls)
        await self._aborts.wait_for(spec.run_id)

    async def _failed(self, run: _Supervised, error: str, trace: str) -> ProcessOutcome:
        lines = await self.log_tail(run.spec.run_dir, OUTCOME_LOG_LINES)
        return ProcessOutcome("failed", run.num_attempts, error, trace, lines)


async def _first_of(ended: "asyncio.Task[Report]", stopping: asyncio.Event) -> None:
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()


def _ending(report: Report) -> str:
    """One line on how a process ended that did not return."""
    if report.error:
        return report.error
    if report.exit_code < 0:
        number = -report.exit_code
        return f"the run process was killed by signal {number} ({signal.strsignal(number)})"
    return f"the run process ended with exit code {report.exit_code} before run_rollout returned"
