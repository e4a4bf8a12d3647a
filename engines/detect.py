"""Detect which kind of engine answers at an address, at the first call that reaches it."""

import asyncio
from contextlib import AsyncExitStack
from typing import Self

import httpx

from forebay.core.errors import EngineError
from forebay.engines.abc import ABORT_TIMEOUT_S, Engine, EngineLoad, ModelInfo
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.dialect import PLAIN, SGLANG, VLLM, EngineDialect
from forebay.engines.openai import OpenAIEngine
from forebay.engines.router_workers import PROBE_TIMEOUT_S, WorkerAdmin, admin_client, root_url
from forebay.engines.sglang import SGLangEngine

# The second path is for servers before 0.5, the last for routers.
SGLANG_PATHS = ("/model_info", "/get_model_info", "/workers")


async def dialect_by(http: httpx.AsyncClient, url: str) -> EngineDialect:
    """Return the kind of the engine at ``url``, which has no ``/v1``. Raises ``EngineUnavailable``."""
    admin = WorkerAdmin(http, url)
    for path in SGLANG_PATHS:
        if await admin.answers(path):
            return SGLANG
    return VLLM if await admin.is_vllm() else PLAIN


class DetectedEngine(Engine):
    """An ``SGLangEngine`` or an ``OpenAIEngine``, chosen when the address first answers.

    ``template`` applies to SGLang only.
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
        self._template = template
        self._api_key = api_key
        self._model = model
        self._stack = AsyncExitStack()
        self._found: SGLangEngine | OpenAIEngine | None = None
        self._finding: asyncio.Task[SGLangEngine | OpenAIEngine] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._finding is not None:
            self._finding.cancel()
        await self._stack.aclose()
        self._found = None

    async def found(self) -> SGLangEngine | OpenAIEngine:
        """Return the engine. Raises ``EngineUnavailable`` while the address is unreachable."""
        if self._found is not None:
            return self._found
        if self._finding is None:
            self._finding = asyncio.create_task(self._find())
            self._finding.add_done_callback(self._finding_ended)
        # Shielded: callers share the attempt, and a caller that is cancelled must not end it for the others.
        return await asyncio.shield(self._finding)

    async def model_info(self) -> ModelInfo:
        return await (await self.found()).model_info()

    async def load(self) -> EngineLoad | None:
        return await (await self.found()).load()

    async def abort(self, rid_prefix: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        engine = await self._found_or_none()
        return None if engine is None else await engine.abort(rid_prefix, timeout_s=timeout_s)

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        engine = await self._found_or_none()
        return None if engine is None else await engine.abort_all(timeout_s=timeout_s)

    async def is_available(self) -> bool:
        engine = await self._found_or_none()
        return engine is not None and await engine.is_available()

    async def _found_or_none(self) -> SGLangEngine | OpenAIEngine | None:
        try:
            return await self.found()
        except (EngineError, TimeoutError):
            return None

    async def _find(self) -> SGLangEngine | OpenAIEngine:
        engine: SGLangEngine | OpenAIEngine
        async with admin_client(self._api_key, PROBE_TIMEOUT_S) as http:
            dialect = await dialect_by(http, self.url)
        if dialect is SGLANG:
            engine = SGLangEngine(self.url, api_key=self._api_key, model=self._model, template=self._template)
        else:
            engine = OpenAIEngine(self.url, api_key=self._api_key, model=self._model, dialect=dialect)
        self._found = await self._stack.enter_async_context(engine)
        return engine

    def _finding_ended(self, task: asyncio.Task[SGLangEngine | OpenAIEngine]) -> None:
        self._finding = None
        if not task.cancelled():
            # Retrieved, so that asyncio does not warn about it when every caller was cancelled.
            task.exception()
