"""Shared by the recorder and the recorded engine: the address, reading requests, and sending errors."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, Self

from starlette.types import Message, Receive, Scope, Send

from forebay.core.addresses import host_patterns
from forebay.core.errors import ForebayError
from forebay.core.waiting import Signal
from forebay.engines.fake_sglang.reply_bodies import error_body
from forebay.engines.fake_sglang.routes import MAX_BODIES_BYTES, guarded
from forebay.replay.call_request import CallRequest
from forebay.replay.recorded_calls import MAX_REQUEST_BYTES
from forebay.replay.recording_secrets import without_keys
from forebay.web.bodies import BodyBudget
from forebay.web.connection_limits import DEFAULT_LIMITS
from forebay.web.http_protocol import ReplyHandle
from forebay.web.replies import ClientGone, encode, send_json
from forebay.web.serving import SHUTDOWN_S, serve_app

Answer = Callable[[CallRequest, Scope, Receive, Send], Awaitable[None]]


class ServedEngine(ABC):
    """A server that speaks an engine's protocol. Web pages are kept out, as with the embedded engines.

    Raises ``InvalidInput`` for an invalid name in ``allowed_hosts``.
    """

    def __init__(self, host: str, port: int, allowed_hosts: Sequence[str], insecure: bool) -> None:
        self._host, self._port = host, port
        self._allowed_hosts = host_patterns(allowed_hosts)
        self._insecure = insecure
        self.num_broken_off = 0
        """Calls that were cut off on exit."""
        self._limits: set[asyncio.Timeout] = set()
        """The time limits of the calls in flight, which are set on exit."""
        self._ends_s: float | None = None
        self._has_ended = Signal()
        self._stack = AsyncExitStack()
        self._budget = BodyBudget(MAX_REQUEST_BYTES, MAX_BODIES_BYTES)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self.enter(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._stack.aclose()

    @abstractmethod
    async def enter(self, stack: AsyncExitStack) -> None:
        """Open everything that ``stack`` must close, and ``serve``."""

    @property
    def url(self) -> str:
        """The address to give to a client, without ``/v1``."""
        if not self._port:
            raise RuntimeError("the engine has no address yet: use `async with engine` or `with engine.in_thread()`")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)  # noqa: S104 - recognised, not bound
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def serve(self, stack: AsyncExitStack, answer: Answer) -> None:
        """Answer requests until ``stack`` is left; calls in flight then have 2 s to end.

        Raises ``InvalidInput`` if it cannot listen on the address.
        """
        self.num_broken_off, self._ends_s = 0, None

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._receive(answer, scope, receive, send)

        kept_away = guarded(app, host=self._host, allowed_hosts=self._allowed_hosts, insecure=self._insecure)
        serving = serve_app(kept_away, host=self._host, port=self._port, limits=DEFAULT_LIMITS)
        self._port = await stack.enter_async_context(serving)
        # Before the server shuts down: it would log the calls that it cuts off as errors.
        stack.push_async_callback(self._end_calls)

    async def _end_calls(self) -> None:
        self._ends_s = asyncio.get_running_loop().time() + SHUTDOWN_S
        in_flight = set(self._limits)
        for limit in in_flight:
            limit.reschedule(self._ends_s)
        while in_flight & self._limits:
            await self._has_ended.wait()

    async def _receive(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        limit = asyncio.timeout_at(self._ends_s)
        self._limits.add(limit)
        try:
            async with limit:
                await self._read_and_answer(answer, scope, receive, send_noted)
        except TimeoutError:
            if not limit.expired():
                raise
            self.num_broken_off += 1
            if has_begun:
                break_off(scope)
            else:
                message = "the call was cut off: the server is shutting down"
                await send_error(send, HTTPStatus.SERVICE_UNAVAILABLE, message)
        finally:
            self._limits.discard(limit)
            self._has_ended.notify()

    async def _read_and_answer(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        body = None
        try:
            body = await self._budget.read(scope, receive)
            request = CallRequest.read(scope["method"], without_keys(target_of(scope)), body.data)
            await answer(request, scope, receive, send)
        except ForebayError as error:
            await send_error(send, error.status, f"{error.message} ({error.hint})" if error.hint else error.message)
        except ClientGone:
            pass
        finally:
            if body is not None:
                body.free()


def target_of(scope: Scope) -> str:
    """The path and query of a request, unchanged."""
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def send_error(send: Send, status: int, message: str) -> None:
    """Send an error in SGLang's format, with the field that OpenAI's clients read."""
    body: dict[str, Any] = error_body(message, status)
    # Errors of `/generate` have a format of their own; the added field lets its clients find the message, too.
    await send_json(send, status, encode({**body, "error": {"message": message}}))


def break_off(scope: Scope) -> None:
    """Cut the connection in the middle of a reply. Raises ``ConnectionResetError`` if the server has no handle."""
    reply = ReplyHandle.of(scope)
    if reply is None:
        raise ConnectionResetError("the recorded reply ends here")
    reply.break_off()


def is_refusal(status: int) -> bool:
    """Whether a status concerns the caller's credentials, which are never stored."""
    return status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def is_answer(status: int) -> bool:
    """Whether a status answers the request itself, not the caller's credentials or an unavailable server."""
    not_there = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
    return not is_refusal(status) and status not in not_there
