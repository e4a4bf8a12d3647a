"""The application with the SGLang routes that Forebay uses."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from forebay.core.errors import EngineError, ForebayError, InvalidInput
from forebay.engines.fake_sglang.administration import Administration
from forebay.engines.fake_sglang.backend import Backend
from forebay.engines.fake_sglang.calls import JSONObject
from forebay.engines.fake_sglang.reply_bodies import ChatWriter, GenerateWriter, error_body, generate_error
from forebay.engines.fake_sglang.request_bodies import (
    Body,
    ChatBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from forebay.engines.fake_sglang.requests import CallsInFlight, chat_call, check_tokens, generate_calls
from forebay.web.bodies import BodyBudget, BodyMiddleware
from forebay.web.browser_guard import BrowserGuard
from forebay.web.replies import ClientGone

SGLANG_VERSION = "0.5.23"
"""The imitated version."""

TRACEPARENT = "traceparent"
"""The header of W3C Trace Context."""

MAX_BODY_BYTES = 64 << 20
MAX_BODIES_BYTES = 256 << 20

Parser = Callable[[JSONObject], JSONObject]


def create_app(backend: Backend, *, parsers: Mapping[str, Parser] | None = None) -> Starlette:
    """Return the application for an engine. ``parsers`` serve additional paths, each converting a body to a reply."""
    routes = SGLangFace(backend).routes()
    routes += [Route(path, _parse(parser), methods=["POST"]) for path, parser in (parsers or {}).items()]
    return app_of(routes)


def app_of(routes: Sequence[Route]) -> Starlette:
    """Return an application of these routes, with body size limits and errors in SGLang's format."""
    return Starlette(
        routes=routes,
        middleware=[Middleware(BodyMiddleware, BodyBudget(MAX_BODY_BYTES, MAX_BODIES_BYTES))],
        exception_handlers={ForebayError: _refuse, ClientGone: _client_gone},
    )


def guarded(app: ASGIApp, *, host: str = "", allowed_hosts: Iterable[str] = (), insecure: bool = False) -> ASGIApp:
    """Protect ``app`` from web pages: accepts only the host names ``host`` and ``allowed_hosts``.

    ``insecure`` accepts every host name.
    """
    return BrowserGuard(app, [host, *allowed_hosts], is_insecure=insecure, error_body=_foreign)


def _foreign(error: ForebayError) -> JSONObject:
    return error_body(f"{error.message} ({error.hint})", error.status)


class SGLangFace:
    """SGLang's routes; each method serves one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._in_flight = CallsInFlight(backend)
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Return the routes that every engine serves."""
        asked = {
            "/health": self.health,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/models": self.models,
            "/v1/loads": self.loads,
        }
        sent = {
            "/v1/chat/completions": self.chat,
            "/generate": self.generate,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in asked.items()]
        routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in sent.items()]
        return routes + Administration(self._backend).routes()

    async def chat(self, request: Request) -> Response:
        """Answer a chat; the call ends if the client disconnects."""
        body = ChatBody.read(await request.body())
        call = await chat_call(self._backend, body, request.headers.get(TRACEPARENT))
        return await self._in_flight.answer(request, [call], ChatWriter(body, call, self._backend))

    async def generate(self, request: Request) -> Response:
        """Continue a text or token ids, or each of a list; the calls end if the client disconnects."""
        body = GenerateBody.read(await request.body())
        calls = await generate_calls(self._backend, body, request.headers.get(TRACEPARENT))
        return await self._in_flight.answer(request, calls, GenerateWriter(body, calls, self._backend))

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or of a chat's prompt."""
        body = TokenizeBody.read(await request.body())
        if body.messages is None:
            tokens = await self._backend.encode(body.prompt or "")
        else:
            tokens = await self._backend.encode_chat(body.messages, body.tools or [], is_continued=False)
        counts = {"count": len(tokens), "max_model_len": self._backend.context_length}
        return JSONResponse({"tokens": tokens, **counts})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, or of each list of them."""
        body = DetokenizeBody.read(await request.body())
        lists = [tokens for tokens in body.tokens if isinstance(tokens, list)]
        flat = [token for token in body.tokens if isinstance(token, int)]
        for tokens in [flat, *lists]:
            check_tokens(self._backend, tokens, "tokens")
        texts = [
            await self._backend.decode(tokens, with_marks=not body.skip_special_tokens) for tokens in lists or [flat]
        ]
        return JSONResponse({"text": texts if lists else texts[0]})

    async def health(self, _: Request) -> Response:
        """Return 200 while calls are answered, otherwise 503."""
        return Response(status_code=200 if self._backend.is_alive else 503)

    async def model_info(self, _: Request) -> Response:
        """Return the served model."""
        backend = self._backend
        common = {"served_model_name": backend.name, "weight_version": backend.weight_version, "is_generation": True}
        return JSONResponse({**common, **backend.model_info()})

    async def server_info(self, _: Request) -> Response:
        """Return the start options: chats use OpenAI's sampling defaults unless the engine reports otherwise."""
        started = {"version": SGLANG_VERSION, "sampling_defaults": "openai", "preferred_sampling_params": None}
        metrics = {"enable_metrics": self._backend.has_metrics}
        return JSONResponse({**started, **metrics, **self._backend.model_info(), **self._backend.server_info()})

    async def models(self, _: Request) -> Response:
        """Return the model in OpenAI's list format."""
        name, length = self._backend.name, self._backend.context_length
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "forebay", "root": name}
        return JSONResponse({"object": "list", "data": [{**card, "max_model_len": length}]})

    async def loads(self, _: Request) -> Response:
        """Return the engine's load; each choice counts as a request."""
        head = {"timestamp": datetime.now(UTC).isoformat(), "version": version("forebay")}
        machine = {"accelerator": None, "num_accelerators": 1}
        return JSONResponse({**head, **machine, "loads": [{"dp_rank": 0, **self._backend.load()}]})


def _parse(parser: Parser) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(parser(Body.read(await request.body()).given))

    return endpoint


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ForebayError)
    # OpenAI's clients expect 400 for a rejected request, where Forebay's own routes return 422.
    status = 400 if isinstance(error, InvalidInput) else error.status
    if isinstance(error, EngineError):
        status = error.status_code or status
    is_native = request.url.path == "/generate"
    body = generate_error(error.message) if is_native else error_body(error.message, status, param=error.field)
    return JSONResponse(body, status_code=status)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    """Return an empty reply: the client disconnected, which is not an error."""
    return Response(status_code=499)
