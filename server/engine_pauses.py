"""Pauses a run's engines while their weights change, and ensures that they resume."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from forebay.buffer.buffer import Buffer
from forebay.core.addresses import engine_urls
from forebay.core.errors import EnginesPaused, InvalidInput, PauseExpired, RunNotFound, StorageFailed
from forebay.core.run import Run
from forebay.core.tasks import TaskSet
from forebay.core.weight_versions import Loaded, PauseMode
from forebay.engines import weight_updates
from forebay.engines.router_workers import WorkerAdmin, admin_client, root_url
from forebay.server.engine_pause_records import Kind, PauseRecord, PauseRecords

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 900.0
"""Time limit for a worker to load its weights, in seconds."""
RESUME_NOW_S = 5.0
RESUME_LATER_S = 900.0

Announce = Callable[[Loaded], Awaitable[None]]
"""Records in the buffer which weights the engines have now."""


@dataclass(frozen=True, slots=True)
class RunEngines:
    """Addresses of a run's engines."""

    run_id: str
    urls: list[str]
    api_key: str | None = field(repr=False)

    @classmethod
    def of(cls, run: Run) -> Self:
        """The engines named by the run's payload. Raises ``InvalidInput`` if it names none."""
        urls = [root_url(url) for url in engine_urls(run.payload)]
        if not urls:
            raise InvalidInput(
                f"run {run.run_id!r} names no engine: it was started without remote_engine_url",
                hint="start a run with remote_engine_url; a weight version without a mode needs no engine",
                field="remote_engine_url",
            )
        return cls(run.run_id, urls, run.payload.get("api_key"))


class EnginePauses:
    """All pauses requested from this server. Enter it before the server listens.

    A run's deadlines do not count while its engines are paused.

    Each pause is recorded on disk before an engine is paused. If the server dies during a weight update, it resumes
    the engines when it restarts. A pause requested by a trainer survives a restart, and ends at its time limit if the
    trainer does not return.
    """

    def __init__(self, folder: Path, buffer: Buffer) -> None:
        self._records = PauseRecords(folder)
        self._buffer = buffer
        self._paused_runs: set[str] = set()
        """Runs whose engines are paused."""
        self._for_trainers: dict[str, PauseRecord] = {}
        """By run: the pauses that last until a trainer ends them or they time out."""
        self._expired: dict[str, PauseRecord] = {}
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._later: dict[str, tuple[PauseRecord, asyncio.Task[None]]] = {}
        """Workers that did not answer. They are asked again to resume, until another pause takes them over."""
        self._tasks = TaskSet()
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By run and by worker, so that each handles one request at a time."""

    async def __aenter__(self) -> Self:
        for record in await asyncio.to_thread(self._records.all):
            # Before the server listens: a returning trainer finds its pause, and no engine stays paused by accident.
            if record.kind == "update":
                logger.warning("run %s: a weight update was interrupted; its engines are resumed", record.run_id)
                self._resume_later(record)
            elif record.kind == "held":
                self._begin_pause(record)
            else:
                self._expired[record.run_id] = record
        for run in [entry.run for entry in self._buffer.entries if entry.run.is_paused]:
            self._mark(run.run_id, is_paused=run.run_id in self._for_trainers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    def of(self, run_id: str) -> PauseRecord | None:
        """The run's active pause that its trainer requested; None without one."""
        return self._for_trainers.get(run_id)

    async def update(
        self, engines: RunEngines, version: int, model_path: str, mode: PauseMode, announce: Announce
    ) -> dict[str, Any]:
        """Load other weights on every worker of the run, and announce them before a token is sampled from them.

        Completes even if the caller leaves. Raises ``EngineUnavailable`` if nothing was changed, ``EnginesPaused``, and
        ``WeightUpdateFailed`` once the engines were asked to resume.
        """
        work = self._update(engines, version, model_path, mode, announce)
        return await asyncio.shield(self._tasks.start(work))

    async def pause(self, engines: RunEngines, mode: PauseMode, limit_s: float) -> PauseRecord:
        """Pause the engines, idle, until ``resume`` or for ``limit_s`` seconds.

        Repeating the call restarts the time limit. Raises as ``update`` does.
        """
        return await asyncio.shield(self._tasks.start(self._pause(engines, mode, limit_s)))

    async def resume(self, run_id: str, version: int | None, announce: Announce) -> bool:
        """Resume the engines, with weights named ``version``; return whether they were paused.

        Raises ``PauseExpired`` if the pause had timed out. Raises ``WeightUpdateFailed`` if a worker did not accept the
        name; the engines resume anyway.
        """
        return await asyncio.shield(self._tasks.start(self._resume(run_id, version, announce)))

    # --- work that completes even if the caller leaves

    async def _update(
        self, engines: RunEngines, version: int, model_path: str, mode: PauseMode, announce: Announce
    ) -> dict[str, Any]:
        async with self._reserved(engines) as workers:
            if pause := self._for_trainers.get(engines.run_id):
                raise EnginesPaused(engines.run_id, pause.mode)
            record = self._record(engines, workers, "update", mode)
            await self._write(record)  # first: a server that dies now resumes the engines after its restart
            self._mark(engines.run_id, is_paused=True)
            began_s = time.monotonic()
            try:
                await weight_updates.pause(workers, mode)
                await weight_updates.wait_idle(workers, mode)
                name = await weight_updates.update(workers, model_path, version, mode)
                loaded = Loaded(version, name, keeps_cache=mode == "in_place")
                # Before the new weights sample a token: its sample would seem newer than the step.
                await announce(loaded)
            finally:
                await self._let_go(record)
            return {"workers": record.urls, "paused_s": round(time.monotonic() - began_s, 3)}

    async def _pause(self, engines: RunEngines, mode: PauseMode, limit_s: float) -> PauseRecord:
        async with self._reserved(engines) as workers:
            earlier = self._for_trainers.get(engines.run_id)
            if earlier is not None and earlier.mode != mode:
                raise EnginesPaused(engines.run_id, earlier.mode)
            self._end_pause(engines.run_id)  # it must not time out meanwhile
            record = self._record(engines, workers, "held", mode, limit_s)
            try:
                await self._write(record)
                self._mark(engines.run_id, is_paused=True)
                await weight_updates.pause(workers, mode)
                await weight_updates.wait_idle(workers, mode)
                # The cached values were computed with weights that are about to be replaced.
                await weight_updates.flush(workers, mode)
                record = self._record(engines, workers, "held", mode, limit_s)  # the time limit counts from now on
                await self._write(record)
            except BaseException:  # including a caller that leaves: engines must not stay paused
                await self._let_go(record)
                raise
            self._begin_pause(record)
            return record

    async def _resume(self, run_id: str, version: int | None, announce: Announce) -> bool:
        pause = self._for_trainers.get(run_id)
        async with self._locked(run_id, pause.urls if pause else ()):
            record = self._end_pause(run_id)  # checked again: it may have expired while waiting for the locks
            if record is None:
                await self._check_expiry(run_id)
                if version is not None:
                    await announce(Loaded(version))
                return False
            try:
                if version is not None:
                    async with admin_client(record.api_key) as http:
                        workers = [await weight_updates.admin_at(http, url) for url in record.urls]
                        name = await weight_updates.name_weights(workers, version, record.mode)
                    await announce(Loaded(version, name, keeps_cache=record.mode == "in_place"))
            finally:
                await self._let_go(record)
            return True

    async def _check_expiry(self, run_id: str) -> None:
        # Raised only once: the trainer that gets it pauses again, and its next resume is an ordinary one.
        expired = self._expired.pop(run_id, None)
        if expired is not None:
            await asyncio.to_thread(self._records.remove, run_id)
            raise PauseExpired(expired.limit_s)

    # --- parts

    @asynccontextmanager
    async def _reserved(self, engines: RunEngines) -> AsyncIterator[list[WorkerAdmin]]:
        """Lock the workers of a run, which other runs may share. Raises ``EnginesPaused``."""
        async with admin_client(engines.api_key, CALL_TIMEOUT_S) as http:
            workers = await weight_updates.workers_of(http, engines.urls)
            urls = {worker.url for worker in workers}
            async with self._locked(engines.run_id, urls):
                for other in self._for_trainers.values():
                    if other.run_id != engines.run_id and urls & set(other.urls):
                        raise EnginesPaused(other.run_id, other.mode)
                await self._take_over(urls)
                self._expired.pop(engines.run_id, None)
                yield workers

    @asynccontextmanager
    async def _locked(self, run_id: str, urls: Iterable[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for name in [run_id, *sorted(urls)]:  # in a fixed order, so that two runs do not deadlock
                await stack.enter_async_context(self._locks[name])
            yield

    async def _take_over(self, urls: set[str]) -> None:
        """Stop asking workers that are about to be paused to resume after an earlier pause."""
        for run_id, (record, task) in list(self._later.items()):
            if not urls & set(record.urls):
                continue
            task.cancel()
            del self._later[run_id]
            if left := [url for url in record.urls if url not in urls]:
                self._resume_later(msgspec.structs.replace(record, urls=left))
            else:
                await self._forget(record)

    def _record(
        self, engines: RunEngines, workers: list[WorkerAdmin], kind: Kind, mode: PauseMode, limit_s: float = 0.0
    ) -> PauseRecord:
        return PauseRecord(
            run_id=engines.run_id,
            kind=kind,
            mode=mode,
            urls=[worker.url for worker in workers],
            api_key=engines.api_key,
            limit_s=limit_s,
            until_s=time.time() + limit_s,
        )

    async def _write(self, record: PauseRecord) -> None:
        try:
            await asyncio.to_thread(self._records.write, record)
        except OSError as error:
            raise StorageFailed(str(error), what="the pause of the engines cannot be stored") from error

    def _begin_pause(self, record: PauseRecord) -> None:
        self._end_pause(record.run_id)
        self._for_trainers[record.run_id] = record
        self._mark(record.run_id, is_paused=True)
        self._timers[record.run_id] = self._tasks.start(self._expire(record))

    def _end_pause(self, run_id: str) -> PauseRecord | None:
        timer = self._timers.pop(run_id, None)
        if timer is not None and timer is not asyncio.current_task():  # an expired timer ends its own pause
            timer.cancel()
        return self._for_trainers.pop(run_id, None)

    async def _expire(self, record: PauseRecord) -> None:
        await asyncio.sleep(max(0.0, record.until_s - time.time()))
        async with self._locked(record.run_id, record.urls):
            logger.warning("run %s: nothing resumed its engines within %g s; resuming", record.run_id, record.limit_s)
            self._end_pause(record.run_id)
            self._expired[record.run_id] = expired = msgspec.structs.replace(record, kind="expired")
            await self._let_go(expired)

    async def _let_go(self, record: PauseRecord) -> None:
        """Resume the engines; those that do not answer at once are retried in the background."""
        left = await self._resumed(record, RESUME_NOW_S)
        self._mark(record.run_id, is_paused=False)
        if left:
            logger.warning("run %s: no answer to the resume request from %s; retrying", record.run_id, ", ".join(left))
            self._resume_later(msgspec.structs.replace(record, urls=left))
        else:
            await self._forget(record)

    def _resume_later(self, record: PauseRecord) -> None:
        self._later[record.run_id] = record, self._tasks.start(self._keep_resuming(record))

    async def _keep_resuming(self, record: PauseRecord) -> None:
        left = await self._resumed(record, RESUME_LATER_S)
        for url in left:
            logger.error("%s may still be paused: POST /continue_generation (vLLM: /resume) resumes it", url)
        self._later.pop(record.run_id, None)
        await self._forget(record)  # even if workers are left: a restarted server could do no more

    async def _resumed(self, record: PauseRecord, timeout_s: float) -> list[str]:
        async with admin_client(record.api_key) as http:
            return await weight_updates.resume([WorkerAdmin(http, url) for url in record.urls], timeout_s)

    async def _forget(self, record: PauseRecord) -> None:
        # One file per run: the expired pause replaces the record.
        if record.run_id in self._expired:
            await self._write(self._expired[record.run_id])
        elif record.run_id not in self._for_trainers:
            await asyncio.to_thread(self._records.remove, record.run_id)

    def _mark(self, run_id: str, *, is_paused: bool) -> None:
        if is_paused:
            self._paused_runs.add(run_id)
        else:
            self._paused_runs.discard(run_id)
        # In the background: engines must not wait for a disk before they resume.
        self._tasks.start(self._write_mark(run_id))

    async def _write_mark(self, run_id: str) -> None:
        """Record in the buffer whether the run is paused, on which deadlines depend. Waits out a full disk."""

        def change(run: Run) -> None:
            before, run.is_paused = run.is_paused, run_id in self._paused_runs
            if run.is_paused != before:
                what: Literal["paused", "resumed"] = "paused" if run.is_paused else "resumed"
                self._buffer.get(run_id).buffer.changes.weights_changed(what)

        try:
            await self._buffer.update(run_id, change)
        except RunNotFound:
            logger.warning("the engines of run %s are paused or resumed, but the buffer does not have the run", run_id)
