"""Any OpenAI-compatible engine, through the ``openai`` package."""

import asyncio
from types import TracebackType
from typing import Any, Self

import openai
from openai import AsyncOpenAI

from forebay.core.errors import EngineError
from forebay.engines.abc import ChatReply, ChatRequest, Engine, ModelInfo
from forebay.engines.openai_wire import UNAVAILABLE_STATUSES, chat_body, read_reply, root_url, status_error, unreachable

CONNECT_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 5.0


class OpenAIEngine(Engine):
    """Chat completions at ``base_url`` (with or without ``/v1``).

    Without ``model`` the first of ``/v1/models`` is asked for, or ``default`` where the server lists none.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        self.url = root_url(base_url)
        self._api_key = api_key
        self._model = model
        self._client: AsyncOpenAI | None = None

    async def __aenter__(self) -> Self:
        # The package wants some key; the environment's must not travel to an address that it was not made for.
        self._client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self._api_key or "none", max_retries=0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def chat(self, request: ChatRequest) -> ChatReply:
        async with asyncio.timeout(request.timeout_s):
            body = self._body(request, await self._served_model())
            return read_reply(await self._complete(body, request.timeout_s), request.rid)

    async def model_info(self) -> ModelInfo:
        return ModelInfo(model=await self._served_model())

    async def is_available(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._opened.models.list()
        except openai.APIStatusError as error:
            # A 401 or a 404 is an answer: somebody is there.
            return error.status_code not in UNAVAILABLE_STATUSES
        except (openai.APIError, TimeoutError):
            return False
        return True

    @property
    def _opened(self) -> AsyncOpenAI:
        if self._client is None:
            raise RuntimeError(
                f"{type(self).__name__} is not open: use `async with {type(self).__name__}(...) as engine`"
            )
        return self._client

    def _body(self, request: ChatRequest, model: str) -> dict[str, Any]:
        return chat_body(request, model)

    async def _complete(self, body: dict[str, Any], timeout_s: float | None) -> bytes:
        fields = dict(body)
        model, messages = fields.pop("model"), fields.pop("messages")
        timeout = openai.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        completions = self._opened.chat.completions.with_raw_response
        try:
            reply = await completions.create(model=model, messages=messages, extra_body=fields, timeout=timeout)
        except openai.APIError as error:
            raise self._translated(error) from error
        return reply.content

    async def _served_model(self) -> str:
        if self._model is None:
            self._model = await self._first_model()
        return self._model

    async def _first_model(self) -> str:
        try:
            listed = (await self._opened.models.list()).data
        except openai.NotFoundError:
            listed = []
        except openai.APIError as error:
            raise self._translated(error) from error
        return listed[0].id if listed else "default"

    def _translated(self, error: openai.APIError) -> EngineError | TimeoutError:
        if isinstance(error, openai.APIStatusError):
            return status_error(self.url, error.status_code, error.response.content)
        # By name: the package stands on httpx or on httpx2, depending on its version.
        if isinstance(error, openai.APITimeoutError) and type(error.__cause__).__name__ != "ConnectTimeout":
            return TimeoutError(f"{self.url} did not answer in time")
        if isinstance(error, openai.APIConnectionError):
            return unreachable(self.url, error)
        return EngineError(f"{self.url}: {error}")
