"""The routes that agents call instead of an engine."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.core.errors import BodyTooLarge, BufferFull
from forebay.core.sample import WRITER_HEADER
from forebay.engines.capture.policy_calls import is_left_out
from forebay.engines.dialect import CHATS
from forebay.gateway.asgi_calls import Exchange, PassedOn, json_reply, raw_reply, refusal_reply
from forebay.gateway.dialects.anthropic.from_chat import from_models, from_tokenize
from forebay.gateway.dialects.anthropic.to_chat import to_tokenize
from forebay.gateway.dialects.dialect import ChatDialect, Dialect, MessagesDialect, ResponsesDialect
from forebay.gateway.dialects.errors import ProtocolRefused
from forebay.gateway.lenient_json import read_chat, read_object
from forebay.gateway.off_loop import LARGE_BYTES, decoded_bytes, off_loop
from forebay.gateway.refusals import Busy, GatewayRefusal, NoObject, NoSuchRoute, Stalled, TooLarge
from forebay.gateway.runs.captured_run import CapturedSession
from forebay.gateway.runs.notes import UNRECORDED
from forebay.gateway.runs.registry import RunRegistry, key_of
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.sessions import Session, TurnLog
from forebay.gateway.streaming import ChatCall
from forebay.gateway.unrecorded import COMPLETIONS, EMBEDDINGS, UnrecordedCall
from forebay.web.bodies import BodyBudget, RequestBody
from forebay.web.connection_limits import RequestStalled
from forebay.web.replies import encode

TRACEPARENT = "traceparent"
"""W3C Trace Context header, by which an agent links a call to one of its own spans."""
WRITE_HEADERS = ("content-type", "retry-after")
"""Headers to copy from the server's reply to a sample; its other headers belong to its connection."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
BASE = "/gateway/{rollout_id}"
RESPONSES = f"{BASE}/v1/responses"
ANTHROPIC = f"{BASE}/anthropic"
VERSIONS = ("/v1", "")
"""Some clients of Anthropic's API omit the version."""

Found = tuple[GatewayRun, Session]
Handler = Callable[[Request, Found, Dialect], Awaitable[ASGIApp]]


class AgentRoutes:
    """Routes below ``/gateway/{rollout_id}/``, called with the rollout's key; errors are in the protocol's format."""

    def __init__(self, registry: RunRegistry, bodies: BodyBudget) -> None:
        self._registry = registry
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """Return all routes."""
        return [
            self._route("POST", f"{BASE}/v1/chat/completions", self._chat, ChatDialect),
            self._route("GET", f"{BASE}/v1/models", self._models, ChatDialect),
            self._route("GET", f"{BASE}/v1/models/{{model:path}}", self._models, ChatDialect),
            self._route("POST", f"{BASE}{COMPLETIONS}", self._unrecorded, ChatDialect),
            self._route("POST", f"{BASE}{EMBEDDINGS}", self._unrecorded, ChatDialect),
            self._route("POST", RESPONSES, self._translated, ResponsesDialect),
            self._route("GET", f"{RESPONSES}/{{response_id}}", self._stored, ResponsesDialect),
            self._route("DELETE", f"{RESPONSES}/{{response_id}}", self._stored, ResponsesDialect),
            self._route("POST", f"{RESPONSES}/{{response_id}}/cancel", self._stored, ResponsesDialect),
            self._route("GET", f"{RESPONSES}/{{response_id}}/input_items", self._input_items, ResponsesDialect),
            *(route for version in VERSIONS for route in self._anthropic(f"{ANTHROPIC}{version}")),
            self._route("POST", f"{BASE}/buffer/write", self._write, ChatDialect),
            Route(f"{ANTHROPIC}/{{rest:path}}", self._endpoint(_unknown, MessagesDialect), methods=METHODS),
            Route(f"{BASE}/{{rest:path}}", self._endpoint(_unknown, ChatDialect), methods=METHODS),
        ]

    def _anthropic(self, base: str) -> list[Route]:
        return [
            self._route("POST", f"{base}/messages", self._translated, MessagesDialect),
            self._route("POST", f"{base}/messages/count_tokens", self._count_tokens, MessagesDialect),
            self._route("GET", f"{base}/models", self._anthropic_models, MessagesDialect),
            self._route("GET", f"{base}/models/{{model:path}}", self._anthropic_models, MessagesDialect),
        ]

    def _route(self, method: str, path: str, handler: Handler, kind: type[Dialect]) -> Route:
        return Route(path, self._endpoint(handler, kind), methods=[method])

    def _endpoint(self, handler: Handler, kind: type[Dialect]) -> Callable[[Request], Awaitable[Any]]:
        """Wrap a handler as a Starlette endpoint that returns an ASGI application."""

        async def answer(request: Request) -> ASGIApp:
            try:
                found = self._registry.agent(request.path_params["rollout_id"], key_of(request))
                return await handler(request, found, kind(found[1].memory))
            except GatewayRefusal as refusal:
                return refusal_reply(kind, refusal)
            except ProtocolRefused as refused:
                return json_reply(*kind.refusal(refused))

        async def endpoint(request: Request) -> ASGIApp:
            async def paid(scope: Scope, receive: Receive, send: Send) -> None:
                try:
                    await (await answer(request))(scope, receive, send)
                finally:
                    if body := getattr(request.state, "body", None):
                        body.free()

            return paid

        return endpoint

    async def _chat(self, request: Request, found: Found, dialect: Dialect) -> ASGIApp:
        content = await self._body(request)
        body = await off_loop(read_chat, content)
        if body is None:  # not a JSON object: the engine reports the error itself
            return PassedOn(_call(request, found), dialect, "POST", CHATS, content)
        return Exchange(_call(request, found), dialect, body)

    async def _translated(self, request: Request, found: Found, dialect: Dialect) -> ASGIApp:
        chat = await off_loop(lambda content: dialect.to_chat(_object(content)), await self._body(request, 3))
        _note(found, dialect.unknown.names)
        return Exchange(_call(request, found), dialect, chat)

    async def _unrecorded(self, request: Request, found: Found, dialect: Dialect) -> ASGIApp:
        (run, session), content = found, await self._body(request)
        path = EMBEDDINGS if request.url.path.endswith(EMBEDDINGS) else COMPLETIONS
        body = await off_loop(read_chat, content)
        if body is None:
            return PassedOn(_call(request, found), dialect, "POST", path, content)
        _note(found, [UNRECORDED + path.rpartition("/")[2]])
        return UnrecordedCall(run, session, path, body, request.headers.get(TRACEPARENT))

    async def _models(self, request: Request, found: Found, dialect: Dialect) -> ASGIApp:
        return PassedOn(_call(request, found), dialect, "GET", _models_path(request))

    async def _anthropic_models(self, request: Request, found: Found, dialect: Dialect) -> ASGIApp:
        return PassedOn(_call(request, found), dialect, "GET", _models_path(request), read=from_models)

    async def _stored(self, request: Request, _: Found, dialect: Dialect) -> ASGIApp:
        """Serve a stored answer for GET, DELETE and the POST that cancels it."""
        store, response_id = dialect.memory.store, request.path_params["response_id"]
        # Nothing runs in the background, so cancelling returns the answer unchanged.
        answer = store.delete(response_id) if request.method == "DELETE" else store.get(response_id)
        return json_reply(HTTPStatus.OK, answer)

    async def _input_items(self, request: Request, _: Found, dialect: Dialect) -> ASGIApp:
        items = dialect.memory.store.input_items(request.path_params["response_id"])
        return json_reply(HTTPStatus.OK, {"object": "list", "data": items, "has_more": False})

    async def _count_tokens(self, request: Request, found: Found, dialect: Dialect) -> ASGIApp:
        memo, unknown = dialect.memory.memo, dialect.unknown
        content = await off_loop(
            lambda content: encode(to_tokenize(_object(content), memo, unknown)), await self._body(request, 3)
        )
        _note(found, dialect.unknown.names)
        return PassedOn(_call(request, found), dialect, "POST", "/tokenize", content, from_tokenize)

    async def _write(self, request: Request, found: Found, _: Dialect) -> ASGIApp:
        """Forward a sample of a captured generator to the server, and return the server's reply."""
        run, session = found
        if not isinstance(session, CapturedSession):  # only generators write samples, not the agents of rollouts
            raise NoSuchRoute(request.method, request.url.path)
        reply = await run.write(await self._body(request), request.headers.get(WRITER_HEADER, ""))
        headers = [(name.encode(), reply.headers[name].encode()) for name in WRITE_HEADERS if name in reply.headers]
        return raw_reply(reply.status, reply.body, headers)

    async def _body(self, request: Request, num_forms: int = 1) -> bytes:
        """Read the body. Raises ``GatewayRefusal``, ``ClientGone``.

        A large body reserves its decoded size until the reply. ``num_forms``: a translation holds three decoded copies.
        """
        try:
            body = await self._bodies.read(request.scope, request.receive)
            if len(body.data) > LARGE_BYTES:
                request.state.body, content, body.data = body, body.data, b""
                await self._pay(body, decoded_bytes(content, num_forms))
                return content
        except BodyTooLarge as error:
            raise TooLarge(error.message) from None
        except BufferFull as error:
            raise Busy(error.message) from None
        except RequestStalled as error:
            raise Stalled(error.message, hint=error.hint) from None
        # Freed at once: a call may take many minutes, and its body is small compared with the record.
        body.free()
        return body.data

    async def _pay(self, body: RequestBody, num_bytes: int) -> None:
        room = self._bodies.num_bytes
        if body.num_bytes + num_bytes > room:
            hint = "send fewer messages, or raise the server's max_bodies_bytes"
            raise TooLarge(f"the decoded body needs about {num_bytes} bytes of memory (limit {room})", hint=hint)
        await body.unfold(num_bytes)
        body.finish()


def _object(content: bytes) -> dict[str, Any]:
    body = read_object(content)
    if body is None:
        raise NoObject
    return body


async def _unknown(request: Request, _found: Found, _dialect: Dialect) -> ASGIApp:
    raise NoSuchRoute(request.method, request.url.path)


def _models_path(request: Request) -> str:
    model = request.path_params.get("model")
    if model is None:
        return "/v1/models"
    if {".", ".."} & set(model.split("/")):  # would reach other routes of the engine
        raise NoSuchRoute(request.method, request.url.path)
    return f"/v1/models/{quote(model)}"


def _note(found: Found, kinds: list[str]) -> None:
    run, session = found
    run.notes.add(kinds, session.notes)


def _call(request: Request, found: Found) -> ChatCall:
    run, session = found
    call = ChatCall(run, session, request.headers.get(TRACEPARENT))
    if is_left_out(request.headers):
        call.turns = TurnLog(lambda _: None)
        call.reasoning = call.recorded = None
        _note(found, [UNRECORDED + "chats"])
    return call
