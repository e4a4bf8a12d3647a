"""Pauses of a run's engines while their weights change, and the certainty that they go on again."""

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
"""How long a worker may take to load its weights."""
RESUME_NOW_S = 5.0
RESUME_LATER_S = 900.0

Announce = Callable[[Loaded], Awaitable[None]]
"""Notes in the buffer which weights the engines have now."""


@dataclass(frozen=True, slots=True)
class RunEngines:
    """Where the engines of a run are."""

    run_id: str
    urls: list[str]
    api_key: str | None = field(repr=False)

    @classmethod
    def of(cls, run: Run) -> Self:
        """What the payload says. Raises ``InvalidInput`` where it names no engine."""
        urls = [root_url(url) for url in engine_urls(run.payload)]
        if not urls:
            raise InvalidInput(
                f"run {run.run_id!r} names no engine that could be paused",
                hint="start it with remote_engine_url, or announce the weight version without a mode",
                field="remote_engine_url",
            )
        return cls(run.run_id, urls, run.payload.get("api_key"))


class EnginePauses:
    """Every pause that this server has asked for. Entered before the server listens.

    While the engines of a run stand still, its deadlines do not count.

    Before an engine is paused, that is on the disk. A server that died in the middle of an update lets the engines go
    on as soon as it is up again; a pause that is held for a trainer outlives it, and ends at its time limit if the
    trainer does not come back.
    """

    def __init__(self, folder: Path, buffer: Buffer) -> None:
        self._records = PauseRecords(folder)
        self._buffer = buffer
        self._paused_runs: set[str] = set()
        """Those whose engines stand still."""
        self._for_trainers: dict[str, PauseRecord] = {}
        """By run: the pauses that last until a trainer ends them, or their time is up."""
        self._expired: dict[str, PauseRecord] = {}
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._later: dict[str, tuple[PauseRecord, asyncio.Task[None]]] = {}
        """Workers that did not answer are asked again to go on, until somebody pauses them anew."""
        self._tasks = TaskSet()
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By run and by worker: each is asked for one thing at a time."""

    async def __aenter__(self) -> Self:
        for record in await asyncio.to_thread(self._records.all):
            # Before the server listens: a trainer that comes back finds its pause, and no engine is left standing.
            if record.kind == "update":
                logger.warning("run %s: an update of its weights was cut off; its engines go on", record.run_id)
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
        """The pause that the run's trainer has asked for, if it lasts."""
        return self._for_trainers.get(run_id)

    async def update(
        self, engines: RunEngines, version: int, model_path: str, mode: PauseMode, announce: Announce
    ) -> dict[str, Any]:
        """Give every worker of the run other weights, and announce them before a token is sampled from them.

        Goes on to its end if the caller leaves. Raises ``EngineUnavailable`` if nothing was done, ``EnginesPaused``,
        and ``WeightUpdateFailed`` after the engines were asked to go on.
        """
        work = self._update(engines, version, model_path, mode, announce)
        return await asyncio.shield(self._tasks.start(work))

    async def pause(self, engines: RunEngines, mode: PauseMode, limit_s: float) -> PauseRecord:
        """Let the engines stand still, idle, until ``resume`` or for ``limit_s`` seconds.

        The same again begins the time anew. Raises as ``update`` does.
        """
        return await asyncio.shield(self._tasks.start(self._pause(engines, mode, limit_s)))

    async def resume(self, run_id: str, version: int | None, announce: Announce) -> bool:
        """Let the engines go on, with weights called ``version``; whether they were paused.

        Raises ``PauseExpired`` if they went on before, by themselves; ``WeightUpdateFailed`` if they did not take the
        name: they go on all the same.
        """
        return await asyncio.shield(self._tasks.start(self._resume(run_id, version, announce)))

    # --- what goes on to its end

    async def _update(
        self, engines: RunEngines, version: int, model_path: str, mode: PauseMode, announce: Announce
    ) -> dict[str, Any]:
        async with self._reserved(engines) as workers:
            if pause := self._for_trainers.get(engines.run_id):
                raise EnginesPaused(engines.run_id, pause.mode)
            record = self._record(engines, workers, "update", mode)
            await self._write(record)  # first: a server that dies now finds it, and lets the engines go on
            self._mark(engines.run_id, is_paused=True)
            began_s = time.monotonic()
            try:
                await weight_updates.pause(workers, mode)
                await weight_updates.wait_idle(workers, mode)
                name = await weight_updates.update(workers, model_path, version, mode)
                loaded = Loaded(version, name, keeps_cache=mode == "in_place")
                # Before a token of theirs is sampled: its sample would seem newer than the step.
                await announce(loaded)
            finally:
                await self._let_go(record)
            return {"workers": record.urls, "paused_s": round(time.monotonic() - began_s, 3)}

    async def _pause(self, engines: RunEngines, mode: PauseMode, limit_s: float) -> PauseRecord:
        async with self._reserved(engines) as workers:
            earlier = self._for_trainers.get(engines.run_id)
            if earlier is not None and earlier.mode != mode:
                raise EnginesPaused(engines.run_id, earlier.mode)
            self._end_pause(engines.run_id)  # its time must not run out meanwhile
            record = self._record(engines, workers, "held", mode, limit_s)
            try:
                await self._write(record)
                self._mark(engines.run_id, is_paused=True)
                await weight_updates.pause(workers, mode)
                await weight_updates.wait_idle(workers, mode)
                # What is cached was computed with weights that are about to go.
                await weight_updates.flush(workers, mode)
                record = self._record(engines, workers, "held", mode, limit_s)  # its time counts from now on
                await self._write(record)
            except BaseException:  # also a caller that goes away: engines must not stand still
                await self._let_go(record)
                raise
            self._begin_pause(record)
            return record

    async def _resume(self, run_id: str, version: int | None, announce: Announce) -> bool:
        pause = self._for_trainers.get(run_id)
        async with self._locked(run_id, pause.urls if pause else ()):
            record = self._end_pause(run_id)  # asked again: it may have expired while the locks were waited for
            if record is None:
                await self._check_expiry(run_id)
                if version is not None:
                    await announce(Loaded(version))
                return False
            try:
                if version is not None:
                    async with admin_client(record.api_key) as http:
                        workers = [WorkerAdmin(http, url) for url in record.urls]
                        name = await weight_updates.name_weights(workers, version, record.mode)
                    await announce(Loaded(version, name, keeps_cache=record.mode == "in_place"))
            finally:
                await self._let_go(record)
            return True

    async def _check_expiry(self, run_id: str) -> None:
        # Raised once only: the trainer that gets it pauses again, and its next resume is an ordinary one.
        expired = self._expired.pop(run_id, None)
        if expired is not None:
            await asyncio.to_thread(self._records.remove, run_id)
            raise PauseExpired(expired.limit_s)

    # --- parts

    @asynccontextmanager
    async def _reserved(self, engines: RunEngines) -> AsyncIterator[list[WorkerAdmin]]:
        """The workers of a run, to itself: several runs may share them. Raises ``EnginesPaused``."""
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
            for name in [run_id, *sorted(urls)]:  # in one order, so that two runs do not wait for each other
                await stack.enter_async_context(self._locks[name])
            yield

    async def _take_over(self, urls: set[str]) -> None:
        """Workers that are about to be paused: nobody may ask them any more to go on after an earlier pause."""
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
            raise StorageFailed(str(error), what="the pause of the engines cannot be written down") from error

    def _begin_pause(self, record: PauseRecord) -> None:
        self._end_pause(record.run_id)
        self._for_trainers[record.run_id] = record
        self._mark(record.run_id, is_paused=True)
        self._timers[record.run_id] = self._tasks.start(self._expire(record))

    def _end_pause(self, run_id: str) -> PauseRecord | None:
        timer = self._timers.pop(run_id, None)
        if timer is not None and timer is not asyncio.current_task():  # a timer that has run out ends its own pause
            timer.cancel()
        return self._for_trainers.pop(run_id, None)

    async def _expire(self, record: PauseRecord) -> None:
        await asyncio.sleep(max(0.0, record.until_s - time.time()))
        async with self._locked(record.run_id, record.urls):
            logger.warning("run %s: its engines go on, nobody asked them to within %g s", record.run_id, record.limit_s)
            self._end_pause(record.run_id)
            self._expired[record.run_id] = expired = msgspec.structs.replace(record, kind="expired")
            await self._let_go(expired)

    async def _let_go(self, record: PauseRecord) -> None:
        """Let the engines go on; those that do not answer at once are asked later, in the background."""
        left = await self._resumed(record, RESUME_NOW_S)
        self._mark(record.run_id, is_paused=False)
        if left:
            logger.warning("run %s: asked to go on, no answer from %s; asking again", record.run_id, ", ".join(left))
            self._resume_later(msgspec.structs.replace(record, urls=left))
        else:
            await self._forget(record)

    def _resume_later(self, record: PauseRecord) -> None:
        self._later[record.run_id] = record, self._tasks.start(self._keep_resuming(record))

    async def _keep_resuming(self, record: PauseRecord) -> None:
        left = await self._resumed(record, RESUME_LATER_S)
        for url in left:
            logger.error("%s may stand still: POST %s/continue_generation lets it go on", url, url)
        self._later.pop(record.run_id, None)
        await self._forget(record)  # also with workers left: another life of the server would do no more

    async def _resumed(self, record: PauseRecord, timeout_s: float) -> list[str]:
        async with admin_client(record.api_key) as http:
            return await weight_updates.resume([WorkerAdmin(http, url) for url in record.urls], timeout_s)

    async def _forget(self, record: PauseRecord) -> None:
        # One file for each run: what is left to remember of the run takes the place of the record.
        if record.run_id in self._expired:
            await self._write(self._expired[record.run_id])
        elif record.run_id not in self._for_trainers:
            await asyncio.to_thread(self._records.remove, record.run_id)

    def _mark(self, run_id: str, *, is_paused: bool) -> None:
        if is_paused:
            self._paused_runs.add(run_id)
        else:
            self._paused_runs.discard(run_id)
        # Not waited for: engines that are to go on must not wait for a disk.
        self._tasks.start(self._write_mark(run_id))

    async def _write_mark(self, run_id: str) -> None:
        """Note in the buffer whether the run is paused then: its deadlines go by that. Waits out a full disk."""

        def change(run: Run) -> None:
            before, run.is_paused = run.is_paused, run_id in self._paused_runs
            if run.is_paused != before:
                what: Literal["paused", "resumed"] = "paused" if run.is_paused else "resumed"
                self._buffer.get(run_id).buffer.changes.weights_changed(what)

        try:
            await self._buffer.update(run_id, change)
        except RunNotFound:
            logger.warning("the engines of run %s are paused, which the buffer does not know", run_id)
