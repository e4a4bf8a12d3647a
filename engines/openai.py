"""Client of vLLM, and of any other OpenAI-compatible engine."""

from typing import Self

import httpx

from forebay.engines.abc import ABORT_TIMEOUT_S, Engine, EngineLoad, ModelInfo
from forebay.engines.aborts import stop_everywhere
from forebay.engines.dialect import PLAIN, EngineDialect
from forebay.engines.router_workers import WorkerAdmin, admin_client, root_url


class OpenAIEngine(Engine):
    """Client of the server at ``base_url`` (with or without ``/v1``), which is of the kind ``dialect``.

    Plain servers report no load and stop no calls; vLLM stops calls by exact ids only, not by a prefix.

    Its model is ``model``; otherwise the first of ``/v1/models``, or ``default`` if the server lists none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        dialect: EngineDialect = PLAIN,
    ) -> None:
        self.url = root_url(base_url)
        self.dialect = dialect
        self._api_key = api_key
        self._model = model
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        self._http = admin_client(self._api_key)
        # As in the openai package: the server may be behind a proxy that redirects clients.
        self._http.follow_redirects = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def model_info(self) -> ModelInfo:
        if self._model is None:
            self._model = await self._admin.first_model()
        version = None if self.dialect is PLAIN else await self._admin.weight_version()
        return ModelInfo(model=self._model, weight_version=version)

    async def load(self) -> EngineLoad | None:
        return None if self.dialect is PLAIN else await self._admin.load()

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> int | None:
        return None if self.dialect is PLAIN else await stop_everywhere([self._admin], None, timeout_s)

    async def is_available(self) -> bool:
        return await self._admin.takes_requests()

    @property
    def _admin(self) -> WorkerAdmin:
        if self._http is None:
            raise RuntimeError("OpenAIEngine is not open: use `async with OpenAIEngine(...) as engine`")
        return self.dialect.admin(self._http, self.url)
