"""Client of SGLang: one server, or a router with workers that may not all be reachable from here."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Self

import httpx

from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.abc import ABORT_TIMEOUT_S, Engine, EngineLoad, ModelInfo
from forebay.engines.aborts import check_prefix, stop_everywhere
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.dialect import SGLANG
from forebay.engines.router_workers import (
    PROBE_TIMEOUT_S,
    UNAVAILABLE_STATUSES,
    ListedWorker,
    WorkerAdmin,
    admin_client,
    root_url,
)

WORKERS_TTL_S = 5.0
"""Seconds for which a router's list of workers is reused."""
WORKER_PROBE_TIMEOUT_S = 2.0
ASK_AGAIN_S = 30.0
OF_A_PROXY = UNAVAILABLE_STATUSES | {504}
"""Statuses of a proxy for an address that it cannot reach."""


class SGLangEngine(Engine):
    """Client of the SGLang server or router at ``base_url``.

    A router is recognised by its list of workers. It drops chat fields that it does not know, such as ``rid``, so chats
    are sent directly to its healthy ``workers``. They go through the router if it lists no worker that takes chats
    (gRPC, separate prefill and decode). With a ``template`` (see ``load_template``) they also do so if no worker is
    reachable from here.
    """

    dialect = SGLANG

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.url = root_url(base_url)
        self.template = template
        self._api_key = api_key
        self._model = model
        self._stack = AsyncExitStack()
        self._http: httpx.AsyncClient | None = None
        self._reach: Reach
        self._for_chats: list[WorkerAdmin] = []
        self._for_admin: list[WorkerAdmin] = []
        """Includes workers that the router reports as unhealthy: they may still be generating."""
        self._is_router = False
        self._listed_s = 0.0
        self._listing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._http = await self._stack.enter_async_context(admin_client(self._api_key))
        self._reach = Reach(self._http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._http = None
        self._for_chats, self._for_admin = [], []

    async def model_info(self) -> ModelInfo:
        """Return the model of the first worker that answers."""
        await self._list()
        *others, last = self._for_chats
        for admin in others:
            with suppress(EngineUnavailable):
                return await self._info_of(admin)
        return await self._info_of(last)

    async def load(self) -> EngineLoad | None:
        await self._list()
        loads = [load for load in await asyncio.gather(*(admin.load() for admin in self._for_chats)) if load]
        return sum(loads, EngineLoad()) if loads else None

    async def abort(self, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        check_prefix(rid_prefix)
        return await stop_everywhere(await self._admins_within(timeout_s), rid_prefix, timeout_s)

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        return await stop_everywhere(await self._admins_within(timeout_s), None, timeout_s)

    async def abandon(self, rid: str) -> None:
        """Abort ``rid`` once at every reachable server, because its client is gone; servers may not know it."""
        admins = await self._admins_within(ABORT_TIMEOUT_S)
        await asyncio.gather(*(admin.abandon(rid) for admin in admins))

    @property
    def is_through_router(self) -> bool:
        """Whether chats go through a router instead of to its workers, as of the last call of ``workers``."""
        return self._is_router and [admin.url for admin in self._for_chats] == [self.url]

    async def workers(self) -> list[str]:
        """Return the addresses that chats are sent to: this server's own, or those of the router's workers."""
        await self._list()
        return [admin.url for admin in self._for_chats]

    async def is_available(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._list(is_fresh=True)
                return any(await asyncio.gather(*(admin.takes_requests() for admin in self._for_chats)))
        except (EngineError, TimeoutError):
            return False

    async def _info_of(self, admin: WorkerAdmin) -> ModelInfo:
        return await admin.model_info() or ModelInfo(model=self._model or await admin.first_model())

    async def _admins_within(self, timeout_s: float) -> list[WorkerAdmin]:
        """Return the servers to stop calls at; none if they cannot be determined in time."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._list()
            return self._for_admin
        return []

    async def _list(self, *, is_fresh: bool = False) -> None:
        """Read a router's list of workers if it is older than 5 s or ``is_fresh`` is set."""
        if is_fresh or self._must_list():
            async with self._listing:
                # Checked again: the previous holder of the lock may have read the list.
                if is_fresh or self._must_list():
                    await self._list_workers()

    def _must_list(self) -> bool:
        if not self._for_chats:
            return True
        return self._is_router and time.monotonic() - self._listed_s > WORKERS_TTL_S

    async def _list_workers(self) -> None:
        # Set first: while one call reads the list again, the others use the previous list.
        self._listed_s = time.monotonic()
        try:
            listed = await WorkerAdmin(self._opened, self.url).workers()
        except (EngineError, TimeoutError):
            if not self._for_chats:
                raise
            return
        self._is_router = listed is not None
        workers = await self._reachable(listed or [])
        self._for_chats = self._admins_of(worker.url for worker in workers if worker.takes_chats)
        self._for_admin = self._admins_of(worker.url for worker in workers)

    def _admins_of(self, urls: Iterable[str]) -> list[WorkerAdmin]:
        # Without duplicates: every data-parallel rank of a worker is listed.
        return [WorkerAdmin(self._opened, url) for url in dict.fromkeys(urls) or [self.url]]

    async def _reachable(self, listed: list[ListedWorker]) -> list[ListedWorker]:
        workers = [worker for worker in listed if worker.speaks_http]
        # Without a template, the only choice is to wait for unreachable workers.
        if self.template is None:
            return workers
        reached = await self._reach.among({worker.url for worker in workers})
        return [worker for worker in workers if worker.url in reached]

    @property
    def _opened(self) -> httpx.AsyncClient:
        if self._http is None:
            raise RuntimeError("SGLangEngine is not open: use `async with SGLangEngine(...) as engine`")
        return self._http


@dataclass(frozen=True)
class _Answer:
    is_reached: bool
    asked_s: float


class Reach:
    """Tracks which addresses are reachable from here: a router may list addresses of its own network.

    An address that answered once counts as reachable from then on: if it stops answering, it is down. An unreachable
    address is tried again after 30 s.
    """

    def __init__(self, http: httpx.AsyncClient, clock: Clock | None = None) -> None:
        self._http = http
        self._clock = clock or SystemClock()
        self._answers: dict[str, _Answer] = {}

    async def among(self, urls: Iterable[str]) -> set[str]:
        """Return the reachable ones of ``urls``; takes up to 2 s."""
        listed = list(urls)
        await asyncio.gather(*(self._ask(url) for url in listed if self._is_due(url)))
        return {url for url in listed if self._answers[url].is_reached}

    def _is_due(self, url: str) -> bool:
        known = self._answers.get(url)
        return known is None or (not known.is_reached and self._clock.monotonic() - known.asked_s > ASK_AGAIN_S)

    async def _ask(self, url: str) -> None:
        try:
            reply = await self._http.get(f"{url}/model_info", timeout=WORKER_PROBE_TIMEOUT_S)
            is_reached = reply.status_code not in OF_A_PROXY
        except httpx.ReadTimeout:
            is_reached = True  # the server is there, but busy
        except httpx.TransportError:
            is_reached = False
        self._answers[url] = _Answer(is_reached, self._clock.monotonic())
