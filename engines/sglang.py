"""SGLang: one server, or a router with the workers behind it, which may not all be reachable from here."""

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
from forebay.engines.router_workers import (
    PROBE_TIMEOUT_S,
    UNAVAILABLE_STATUSES,
    ListedWorker,
    WorkerAdmin,
    admin_client,
    root_url,
)

WORKERS_TTL_S = 5.0
"""How long a router's list of workers is used before it is asked again."""
WORKER_PROBE_TIMEOUT_S = 2.0
ASK_AGAIN_S = 30.0
OF_A_PROXY = UNAVAILABLE_STATUSES | {504}
"""What a proxy answers for an address that it cannot reach."""


class SGLangEngine(Engine):
    """The SGLang server at ``base_url``, or the router there.

    A router is recognised by its list of workers. It drops the fields of a chat that it does not know, ``rid`` among
    them, so chats belong to its ``workers``; the router says which there are and which are healthy. Where it lists none
    that a chat can be sent to (gRPC, prefill and decode apart), chats go through it. With a ``template`` (see
    ``load_template``) they also do where none of the workers can be reached from here.
    """

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
        """Also those that the router finds unhealthy: they may be generating all the same."""
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
        """That of the first worker that answers."""
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
        """Say once to every server that can be reached that nobody waits for ``rid``, which it may not know."""
        admins = await self._admins_within(ABORT_TIMEOUT_S)
        await asyncio.gather(*(admin.abandon(rid) for admin in admins))

    @property
    def is_through_router(self) -> bool:
        """Whether chats go through a router, not to its workers; as known since ``workers`` was last asked."""
        return self._is_router and [admin.url for admin in self._for_chats] == [self.url]

    async def workers(self) -> list[str]:
        """The addresses that chats are sent to: this server's own, or those of the router's workers."""
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
        """The servers to stop calls at; none if they cannot be found out in time."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._list()
            return self._for_admin
        return []

    async def _list(self, *, is_fresh: bool = False) -> None:
        """Read a router's list of workers if it is older than 5 s, or in any case if it must be fresh."""
        if is_fresh or self._must_list():
            async with self._listing:
                # Asked again: whoever had the lock before may have read the list meanwhile.
                if is_fresh or self._must_list():
                    await self._list_workers()

    def _must_list(self) -> bool:
        if not self._for_chats:
            return True
        return self._is_router and time.monotonic() - self._listed_s > WORKERS_TTL_S

    async def _list_workers(self) -> None:
        # Set first: while one call reads the list again, the others go on with the last one.
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
        # Once each: every data-parallel rank of a worker is listed.
        return [WorkerAdmin(self._opened, url) for url in dict.fromkeys(urls) or [self.url]]

    async def _reachable(self, listed: list[ListedWorker]) -> list[ListedWorker]:
        workers = [worker for worker in listed if worker.speaks_http]
        # Without a template nothing could be done about those that are not but to wait for them.
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
    """Knows which addresses answer here: a router may list those of a network of its own.

    One that has answered once counts as reachable from then on: if it no longer answers, it is down. One that did not
    is asked again after 30 s.
    """

    def __init__(self, http: httpx.AsyncClient, clock: Clock | None = None) -> None:
        self._http = http
        self._clock = clock or SystemClock()
        self._answers: dict[str, _Answer] = {}

    async def among(self, urls: Iterable[str]) -> set[str]:
        """Those of ``urls`` that can be reached; takes up to 2 s."""
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
            is_reached = True  # somebody is there, and busy
        except httpx.TransportError:
            is_reached = False
        self._answers[url] = _Answer(is_reached, self._clock.monotonic())
