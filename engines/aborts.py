"""Stop calls by a prefix of their ``rid``, and repeat the abort until they are gone."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError, InvalidInput
from forebay.engines.abc import ABORT_TIMEOUT_S
from forebay.engines.router_workers import WorkerAdmin, admin_client, root_url

ROUND_FIRST_S = 0.05
ROUND_MAX_S = 0.5
MARK_PAUSE_S = 0.005


async def abort_prefix(
    base_url: str, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S, api_key: str | None = None
) -> int | None:
    """Stop every call whose ``rid`` begins with ``rid_prefix`` at ``base_url``, an engine or a router.

    Repeats the abort until the engine is idle, for at most ``timeout_s`` seconds. Returns the number of servers that
    accepted it, or ``None`` if no server answers or supports aborts. Engine failures never raise.
    """
    check_prefix(rid_prefix)
    root = root_url(base_url)
    async with admin_client(api_key, timeout_s) as http:
        try:
            async with asyncio.timeout(timeout_s):
                listed = await WorkerAdmin(http, root).workers()
        except (EngineError, TimeoutError):
            return None
        urls = [root] if listed is None else {worker.url for worker in listed if worker.speaks_http}
        return await stop_everywhere([WorkerAdmin(http, url) for url in urls], rid_prefix, timeout_s)


def check_prefix(rid_prefix: str) -> None:
    """Raise ``InvalidInput`` for an empty prefix, which would match every client's calls."""
    if not rid_prefix:
        raise InvalidInput(
            "an empty rid prefix would stop every call", hint="use abort_all for that", field="rid_prefix"
        )


async def stop_everywhere(workers: Sequence[WorkerAdmin], rid_prefix: str | None, timeout_s: float) -> int | None:
    """Stop the calls of ``rid_prefix``, or every call, at all workers at once. Returns as ``abort_prefix`` does."""
    took_it = await asyncio.gather(*(_Stop(worker, rid_prefix).until_gone(timeout_s) for worker in workers))
    return sum(took_it) or None


class _Stop:
    """The repeated abort at one worker. ``rid_prefix`` ``None`` stops every call."""

    def __init__(self, worker: WorkerAdmin, rid_prefix: str | None) -> None:
        self._worker = worker
        self._rid_prefix = rid_prefix
        self._took_it = False
        self._can_mark = True

    async def until_gone(self, timeout_s: float) -> bool:
        """Repeat until the worker is idle or time is up. Returns whether the worker accepted an abort."""
        # The worker may die, or other calls may keep it busy. Every call that could be stopped was stopped.
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rounds()
        return self._took_it

    async def _rounds(self) -> None:
        pauses = Backoff(ROUND_FIRST_S, ROUND_MAX_S, is_exact=True)
        was_idle = False
        while await self._abort():
            load = await self._worker.load()
            if load is None:
                return
            # One idle report is not enough: a request may still be on its way to the scheduler.
            if load.idle and was_idle:
                return
            was_idle = load.idle
            if not load.idle:
                await self._mark()
            await pauses.wait()

    async def _abort(self) -> bool:
        if self._rid_prefix is None:
            is_known = await self._worker.abort_all()
        else:
            is_known = await self._worker.abort(self._rid_prefix)
        self._took_it = self._took_it or is_known
        return is_known

    async def _mark(self) -> None:
        """Send a request whose ``rid`` is the prefix itself, and abort that request."""
        if not self._can_mark or self._rid_prefix is None:
            return
        # SGLang's scheduler matches by prefix, but its HTTP server (seen in 0.5.23, one tokenizer worker) forwards an
        # abort only if exactly that `rid` is in flight. So a request of 16 tokens is sent under the prefix.
        mark = asyncio.create_task(self._worker.mark(self._rid_prefix))
        try:
            while not (await asyncio.wait({mark}, timeout=MARK_PAUSE_S))[0]:
                await self._worker.abort(self._rid_prefix)
            self._can_mark = mark.result()
        finally:
            mark.cancel()
            await asyncio.gather(mark, return_exceptions=True)
