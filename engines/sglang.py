"""SGLang: one server, or a router with the workers behind it.

Which of the workers that a router lists can be reached from here.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import EngineError
from forebay.engines.abc import ABORT_TIMEOUT_S, ChatReply, ChatRequest, Engine, EngineLoad, ModelInfo
from forebay.engines.aborts import check_prefix, stop_all_everywhere, stop_everywhere
from forebay.engines.admin import ListedWorker, WorkerAdmin, admin_client
from forebay.engines.balance import Member, ask_in_turn
from forebay.engines.chat_over_generate import templated_chat
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.openai import PROBE_TIMEOUT_S, OpenAIEngine
from forebay.engines.openai_wire import UNAVAILABLE_STATUSES, root_url

WORKER_PROBE_TIMEOUT_S = 2.0
ASK_AGAIN_S = 30.0
OF_A_PROXY = UNAVAILABLE_STATUSES | {504}
"""What a proxy answers for an address that it cannot reach."""


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


WORKERS_TTL_S = 5.0
"""How long a router's list of workers is used before it is asked again."""


class SGLangWorker(OpenAIEngine):
    """One SGLang server: chats carry their ``rid``, and one that is given up is aborted."""

    def __init__(self, http: httpx.AsyncClient, url: str, *, api_key: str | None, model: str | None) -> None:
        super().__init__(url, api_key=api_key, model=model)
        self.admin = WorkerAdmin(http, self.url)
        self._abandoned: set[asyncio.Task[None]] = set()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=ABORT_TIMEOUT_S)
        await super().__aexit__(kind, error, trace)

    async def chat(self, request: ChatRequest) -> ChatReply:
        try:
            return await super().chat(request)
        except (TimeoutError, asyncio.CancelledError):
            self._abandon(request.rid)
            raise

    def _body(self, request: ChatRequest, model: str) -> dict[str, Any]:
        body = super()._body(request, model)
        return body if request.rid is None else {"rid": request.rid} | body

    def _abandon(self, rid: str | None) -> None:
        """A server notices a closed connection only after seconds unless the call was streaming, so it is told."""
        if rid is None:
            return
        task = asyncio.create_task(self._abort_once(rid))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _abort_once(self, rid: str) -> None:
        await self.admin.abandon(rid)


class SGLangEngine(Engine):
    """The SGLang server at ``base_url``, or the router there.

    A router is recognised by its list of workers. It drops the fields of a chat that it does not know, ``rid`` among
    them, so chats go straight to its workers, the one with the fewest calls of this client first; the router says which
    there are and which are healthy. Where it lists none that a chat can be sent to (gRPC, prefill and decode apart),
    chats go through it. With a ``template`` (see ``load_template``) they also do where none of the workers can be
    reached from here, and those that can be ``rendered`` go over its ``/generate``, which tells token ids.
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
        self._known: dict[str, Member[SGLangWorker]] = {}
        self._current: list[Member[SGLangWorker]] = []
        self._told: list[WorkerAdmin] = []
        self._is_router = False
        self._listed_s = 0.0
        self._listing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._http = await self._stack.enter_async_context(admin_client(self._api_key))
        self._reach = Reach(self._http)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._http = None
        self._known, self._current, self._told = {}, [], []

    async def chat(self, request: ChatRequest) -> ChatReply:
        async with asyncio.timeout(request.timeout_s):
            members = await self._members()
            if self.is_through_router and self.template is not None:
                reply = await templated_chat(self._opened, self.url, request, self.template)
                if reply is not None:
                    return reply
            return await ask_in_turn(members, lambda worker: worker.chat(request))

    async def model_info(self) -> ModelInfo:
        return await ask_in_turn(await self._members(), _model_info)

    async def load(self) -> EngineLoad | None:
        members = await self._members()
        loads = await asyncio.gather(*(member.server.admin.load() for member in members))
        told = [load for load in loads if load is not None]
        return sum(told, EngineLoad()) if told else None

    async def abort(self, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        check_prefix(rid_prefix)
        return await stop_everywhere(await self._admins_or_none(timeout_s), rid_prefix, timeout_s)

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        return await stop_all_everywhere(await self._admins_or_none(timeout_s), timeout_s)

    async def abandon(self, rid: str) -> None:
        """Tell every server that can be told, once, that nobody waits for ``rid``; they may not have heard of it."""
        admins = await self._admins_or_none(ABORT_TIMEOUT_S)
        await asyncio.gather(*(admin.abandon(rid) for admin in admins))

    @property
    def is_through_router(self) -> bool:
        """Whether chats go through a router, not to its workers; as known since ``workers`` was last asked."""
        return self._is_router and [member.server.url for member in self._current] == [self.url]

    async def workers(self) -> list[str]:
        """The addresses that chats are sent to: this server's own, or those of the router's workers."""
        return [member.server.url for member in await self._members()]

    async def is_available(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answers = await asyncio.gather(*map(_answers, await self._members(fresh=True)))
        except (EngineError, TimeoutError):
            return False
        return any(answers)

    async def _members(self, *, fresh: bool = False) -> list[Member[SGLangWorker]]:
        """Those to send chats to. A router's list is read again after 5 s, or now if it must be ``fresh``."""
        if fresh or self._must_list():
            async with self._listing:
                if fresh or self._must_list():
                    await self._list_workers()
        return self._current

    async def _admins(self) -> list[WorkerAdmin]:
        """Those to tell something: every worker that the router lists, also one that it finds unhealthy."""
        await self._members()
        return self._told

    async def _admins_or_none(self, timeout_s: float) -> list[WorkerAdmin]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._admins()
        except (EngineError, TimeoutError):
            return []

    def _must_list(self) -> bool:
        if not self._current:
            return True
        return self._is_router and time.monotonic() - self._listed_s > WORKERS_TTL_S

    async def _list_workers(self) -> None:
        # Set first: while one call reads the list again, the others go on with the last one.
        self._listed_s = time.monotonic()
        try:
            listed = await WorkerAdmin(self._opened, self.url).workers()
        except (EngineError, TimeoutError):
            if not self._current:
                raise
            return
        self._is_router = listed is not None
        told = await self._reached(listed or [])
        # Once each: every data-parallel rank of a worker is listed.
        chats = dict.fromkeys(worker.url for worker in told if worker.takes_chats)
        self._current = [await self._member(url) for url in chats or [self.url]]
        admins = dict.fromkeys(worker.url for worker in told)
        self._told = [WorkerAdmin(self._opened, url) for url in admins or [self.url]]

    async def _reached(self, listed: list[ListedWorker]) -> list[ListedWorker]:
        """Those that can be told anything from here; without a template nothing else could be done than to wait."""
        speaking = [worker for worker in listed if worker.speaks_http]
        if self.template is None:
            return speaking
        reached = await self._reach.among({worker.url for worker in speaking})
        return [worker for worker in speaking if worker.url in reached]

    async def _member(self, url: str) -> Member[SGLangWorker]:
        if url not in self._known:
            worker = SGLangWorker(self._opened, url, api_key=self._api_key, model=self._model)
            self._known[url] = Member(await self._stack.enter_async_context(worker))
        return self._known[url]

    @property
    def _opened(self) -> httpx.AsyncClient:
        if self._http is None:
            raise RuntimeError("SGLangEngine is not open: use `async with SGLangEngine(...) as engine`")
        return self._http


async def _model_info(worker: SGLangWorker) -> ModelInfo:
    return await worker.admin.model_info() or await worker.model_info()


async def _answers(member: Member[SGLangWorker]) -> bool:
    available = await member.server.is_available()
    if available:
        member.recovered()
    return available
