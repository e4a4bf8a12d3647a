"""HTTP calls to one engine except chats: SGLang's administration, any server's models, a router's workers.

Checked against SGLang 0.5.23 and sglang-router 0.3.2.
"""

import asyncio
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import httpx
import msgspec

from forebay.core.addresses import engine_root, is_http_url
from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.core.weight_versions import PauseMode
from forebay.engines.abc import MARK, EngineLoad, ModelInfo
from forebay.engines.bounded_replies import offer_gzip_async
from forebay.engines.connections import EngineConnections, bound_body, names_proxies, tls
from forebay.engines.read_json import UNREADABLE, read_json, read_object, unreadable

UNAVAILABLE_STATUSES = frozenset({502, 503})
"""Statuses of a proxy or a starting server: the caller waits, and the rollout has not failed."""
NOT_SUPPORTED = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED})
ADMIN_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 5.0


def root_url(base_url: str) -> str:
    """``base_url`` without trailing slashes and without ``/v1``. Raises ``InvalidInput`` unless it is http(s)."""
    root = engine_root(base_url)
    if not is_http_url(root):
        raise InvalidInput(f"{base_url!r} is not the address of an engine", hint="write it as http://HOST:PORT")
    return root


def auth_headers(api_key: str | None) -> dict[str, str]:
    """The bearer header for ``api_key``, or no header at all."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def admin_client(api_key: str | None, timeout_s: float = ADMIN_TIMEOUT_S) -> httpx.AsyncClient:
    """Return an HTTP client for administrative calls with a timeout of ``timeout_s`` seconds."""
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, ADMIN_TIMEOUT_S))
    options: dict[str, Any] = {"headers": auth_headers(api_key), "timeout": timeout}
    if names_proxies():
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [offer_gzip_async], "response": [bound_body]}
        return httpx.AsyncClient(**options, verify=tls(), event_hooks=hooks)
    return httpx.AsyncClient(**options, transport=EngineConnections())


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """A worker in its router's list: whether it speaks HTTP, and whether to send it chats."""

    url: str
    speaks_http: bool
    takes_chats: bool


class _Rank(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int


class _Loads(msgspec.Struct):
    loads: list[_Rank] = []


class _Info(msgspec.Struct):
    served_model_name: str | None = None
    model_path: str | None = None
    weight_version: str | int | None = None


_loads, _info, _any = msgspec.json.Decoder(_Loads), msgspec.json.Decoder(_Info), msgspec.json.Decoder()


class WorkerAdmin:
    """Calls to the server at ``url``.

    Each raises ``EngineUnavailable`` if the server is unreachable, ``EngineError`` for an error status or a malformed
    reply, ``TimeoutError``; nothing else, whatever the server sends.
    """

    absent: ClassVar[Set[int]] = NOT_SUPPORTED
    """Statuses of routes that the server lacks."""
    requirement: ClassVar[str] = "this needs SGLang 0.5.23 or later"
    """What a server needs for the routes of pauses and weights."""
    is_idle_once_paused: ClassVar[bool] = False
    """Whether ``pause`` returns only once nothing is computed any more."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.url = url
        self.http = http

    async def answers(self, path: str) -> bool:
        """Whether ``GET path`` returns 200."""
        reply = await self._call("GET", path)
        if reply.status_code in UNAVAILABLE_STATUSES:
            raise status_error(self.url, reply.status_code, reply.content)
        return reply.status_code == HTTPStatus.OK

    async def takes_requests(self) -> bool:
        """Whether the server answers within 5 s. Returns False for an unreachable server."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reply = await self._call("GET", "/v1/models")
        except (EngineError, TimeoutError):
            return False
        # A 401 or a 404 also shows that the server is running.
        return reply.status_code not in UNAVAILABLE_STATUSES

    async def first_model(self) -> str:
        """Return the first listed model, or ``default`` if the server lists none."""
        body = await self._json("/v1/models") or {}
        with suppress(LookupError, TypeError):
            return str(body["data"][0]["id"])
        return "default"

    async def is_vllm(self) -> bool:
        """Whether the server is vLLM. Others have ``/version`` too, and reject the fields that vLLM takes."""
        if not await self.answers("/version"):
            return False
        models = (await self._json("/v1/models") or {}).get("data")
        return isinstance(models, list) and {"vllm"} == {m.get("owned_by") for m in models[:1] if isinstance(m, dict)}

    async def abort(self, rid: str) -> bool:
        """Ask once to stop ``rid``; False if the server supports no aborts. Does not wait for the call to stop."""
        return await self._is_done("/abort_request", {"rid": rid})

    async def abandon(self, rid: str) -> None:
        """Abort ``rid`` once because its client is gone, ignoring the server's reply."""
        with suppress(EngineError, TimeoutError):
            await self.abort(rid)

    async def abort_all(self) -> bool:
        """Ask once to stop every call; False if the server supports no aborts."""
        return await self._is_done("/abort_request", {"abort_all": True})

    async def load(self) -> EngineLoad | None:
        """Return the requests of all data-parallel ranks, or ``None`` if the server does not report them."""
        reply = await self._known("GET", "/v1/loads?include=core")
        if reply is None:
            return None
        answer = read_json(reply.content, _loads, f"loads at {self.url}")
        return sum((EngineLoad(rank.num_running_reqs, rank.num_waiting_reqs) for rank in answer.loads), EngineLoad())

    async def model_info(self) -> ModelInfo | None:
        """Return the served model, or ``None`` if the server does not report it."""
        # Servers before 0.5 know the second path only.
        raw = await self._json("/model_info") or await self._json("/get_model_info")
        if raw is None:
            return None
        try:
            info = msgspec.convert(raw, _Info)
        except UNREADABLE as error:
            raise unreadable(raw, f"model info at {self.url}", error) from error
        return ModelInfo(
            model=info.served_model_name or info.model_path or "default",
            model_path=info.model_path,
            weight_version=None if info.weight_version is None else str(info.weight_version),
            raw=raw,
        )

    async def weight_version(self) -> str | None:
        """Return the name of the current weights, or ``None`` if the server does not report it."""
        info = await self.model_info()
        return info.weight_version if info is not None else None

    async def check_pauses(self) -> None:
        """Raise ``InvalidInput`` if the server cannot be paused."""
        if await self.model_info() is None:
            hint = "announce the weight version without a mode, and update this engine yourself"
            raise InvalidInput(f"{self.url} is neither SGLang nor vLLM, and cannot be paused", hint=hint, field="mode")

    async def server_info(self) -> dict[str, Any] | None:
        """Return the server's start options, or ``None`` if it does not report them."""
        # Servers before 0.5 know the second path only.
        return await self._json("/server_info") or await self._json("/get_server_info")

    async def mark(self, rid: str) -> bool:
        """Generate a few tokens under ``rid``; False if the server has no ``/generate``."""
        return (await self._call("POST", "/generate", {**MARK, "rid": rid})).status_code not in NOT_SUPPORTED

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation until ``resume``; calls that arrive meanwhile wait.

        Raises ``EngineError`` if the server cannot pause.
        """
        await self._must("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Resume generation; does nothing if the server is not paused. Raises as ``pause`` does."""
        await self._must("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Clear the prefix cache. Raises ``EngineError`` if calls in flight need it."""
        await self._is_done("/flush_cache", {})

    async def pass_scheduler(self) -> None:
        """Return once everything sent to the server before has reached its scheduler."""
        # The scheduler itself answers this request, after everything in its queue.
        await self._call("GET", "/server_info")

    async def update_weights(self, model_path: str, version: str, *, flushes_cache: bool) -> None:
        """Load the weights in the folder ``model_path``, as the server sees it, under a version name.

        Raises ``EngineError`` with the server's message if they do not fit.
        """
        body = {"model_path": model_path, "weight_version": version, "flush_cache": flushes_cache}
        await self._must("/update_weights_from_disk", {**body, "abort_all_requests": False})

    async def set_weight_version(self, version: str) -> None:
        """Set the version name of the current weights. Raises as ``pause`` does."""
        await self._must("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the JSON object that ``POST path`` returns, or ``None`` if the server lacks the path."""
        reply = await self._known("POST", path, body)
        return None if reply is None else read_object(reply.content, f"JSON object at {self.url}{path}")

    async def workers(self) -> list[ListedWorker] | None:
        """Return the workers if this is a router, otherwise ``None``."""
        body = await self._json("/workers")
        if body is None or not isinstance(body.get("workers"), list):
            return None
        try:
            return [_listed(worker) for worker in body["workers"]]
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise unreadable(body, f"list of workers at {self.url}", error) from error

    async def _is_done(self, path: str, body: dict[str, Any]) -> bool:
        """Post ``body``; False if the server lacks ``path``."""
        reply = await self._call("POST", path, body)
        if not reply.is_success and reply.status_code not in self.absent:
            raise status_error(self.url, reply.status_code, reply.content)
        return reply.is_success

    async def _must(self, path: str, body: dict[str, Any]) -> None:
        if not await self._is_done(path, body):
            raise EngineError(f"{self.url} has no {path}", status_code=404, hint=self.requirement)

    async def _json(self, path: str) -> dict[str, Any] | None:
        reply = await self._known("GET", path)
        return None if reply is None else read_object(reply.content, f"JSON object at {self.url}{path}")

    async def _known(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response | None:
        """Return the reply, or ``None`` if the server lacks ``path``."""
        reply = await self._call(method, path, body)
        if reply.status_code in self.absent:
            return None
        if not reply.is_success:
            raise status_error(self.url, reply.status_code, reply.content)
        return reply

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self.http.request(method, self.url + path, json=body)
        except EngineError as error:
            raise EngineError(f"{self.url}{path}: {error.message}", hint=error.hint) from error
        except httpx.ConnectTimeout as error:
            # A connection timeout means that the server is gone, not slow.
            raise unreachable(self.url, error) from error
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{self.url}{path} did not answer in time") from error
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error
        # Endless redirects, invalid addresses, undecodable content: anything an engine may send.
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError) as error:
            raise EngineError(f"{self.url}{path} sent a reply that cannot be read: {error}") from error


def status_error(url: str, status_code: int, content: bytes) -> EngineError:
    """Return the error for an error status, with the server's own message if it sent one."""
    kind = EngineUnavailable if status_code in UNAVAILABLE_STATUSES else EngineError
    return kind(f"{url} answered {status_code}: {_message(content)}", status_code=status_code)


def unreachable(url: str, cause: BaseException) -> EngineUnavailable:
    """Return the error for a server at ``url`` that does not answer."""
    why = str(cause.__cause__ or cause) or type(cause).__name__
    return EngineUnavailable(f"no engine answers at {url}: {why}", hint="start the engine, or check the address")


def _message(content: bytes) -> str:
    # OpenAI nests the message in `error`, SGLang does not, proxies send plain text.
    try:
        body = _any.decode(content)
    except UNREADABLE:
        return content[:500].decode(errors="replace")
    inner = body.get("error", body) if isinstance(body, dict) else body
    message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
    return str(message or body)[:2000]


def _listed(worker: dict[str, Any]) -> ListedWorker:
    # A prefill or decode worker cannot answer a chat alone, and a gRPC worker speaks no HTTP.
    speaks_http = str(worker.get("connection_mode", "http")).lower() == "http"
    is_whole = worker.get("worker_type", "regular") == "regular"
    return ListedWorker(
        # A data-parallel rank is listed as URL@RANK.
        url=root_url(worker["url"].split("@")[0]),
        speaks_http=speaks_http,
        takes_chats=speaks_http and is_whole and bool(worker.get("is_healthy", True)),
    )
