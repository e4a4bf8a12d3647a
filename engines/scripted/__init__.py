"""An engine whose answers come from a Python function, behind a real HTTP server. For tests, ours and users'.

A request arrives at the HTTP interface (``fake_sglang``), which submits each of its prompts to ``ScriptedBackend``.
The back end makes a ``ScriptedCall`` for each choice and asks the script, unless generation is paused. The reply is
encoded in tokens and emitted over its duration, or at once if it has no speed. New tokens go back as pieces, which the
HTTP interface streams as chunks or collects for the whole body. An abort, a pause or a weight update interrupts a reply
in the middle, as with a real model.

- ``ScriptedEngine`` (here): the server; its received calls, waits for them, and a thread of its own.
- ``answers``: the choices in flight, and the effects of aborts, pauses and updates on them.
- ``script``: calls and replies of a script, and the parsers that read replies back from text.
- ``play``: emits one reply.
- ``tokens``: the vocabulary, the chat template, and logprobs.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Self

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.core.addresses import host_patterns
from forebay.engines.fake_sglang.reply_bodies import error_body
from forebay.engines.fake_sglang.routes import create_app, guarded
from forebay.engines.scripted.answers import ScriptedBackend
from forebay.engines.scripted.script import PARSERS, Reply, Script, ScriptedCall
from forebay.web.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from forebay.web.serving import entered_in_thread, serve_app

__all__ = ["Reply", "Script", "ScriptedCall", "ScriptedEngine", "ThreadedEngine"]

WAIT_LIMIT_S = 30.0
"""Generous: these waits take milliseconds on an idle machine, and much longer on a busy one."""


class ScriptedEngine:
    """A server on a free port (or ``port``) of ``host`` that speaks SGLang's HTTP API and answers from ``script``.

    ``script(call)`` is called once for every choice of a chat and returns a text or a ``Reply``; it may be a coroutine
    function. Enter with ``async with``, or with ``with engine.in_thread()`` without an event loop::

        async with ScriptedEngine(lambda call: "4") as engine:
            ...  # engine.url, engine.calls, engine.aborts

    Leaving stops every running call. The engine can be entered again, on the same port. Entering raises
    ``InvalidInput`` with the reason if the engine cannot listen on ``port``.

    Web pages in browsers are rejected. Clients may use an IP address, this machine's own names, or those in
    ``allowed_hosts`` (``.name`` matches all names with this ending); ``insecure`` allows any name. Raises
    ``InvalidInput`` for an invalid name.

    Without parsers (``has_parsers``), streams omit logprobs of tokens without text, such as the end token, as SGLang's
    do. Without metrics (``has_metrics``), replies have no times for queue, prefill and decode. At most ``max_running``
    calls run at once; the others wait in a queue.
    """

    def __init__(
        self,
        script: Script,
        *,
        model: str = "scripted",
        host: str = "127.0.0.1",
        port: int = 0,
        has_parsers: bool = True,
        has_metrics: bool = True,
        max_running: int | None = None,
        allowed_hosts: Sequence[str] = (),
        insecure: bool = False,
        limits: ConnectionLimits = DEFAULT_LIMITS,
    ) -> None:
        self.available = True
        """Set to False to return 503 for everything."""
        self._backend = ScriptedBackend(
            script, model, has_parsers=has_parsers, has_metrics=has_metrics, max_running=max_running
        )
        self._host, self._port = host, port
        self._limits = limits
        self._stack = AsyncExitStack()
        self._allowed_hosts = host_patterns(allowed_hosts)
        self._insecure = insecure

    async def __aenter__(self) -> Self:
        face = self._face()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            refusal = JSONResponse(error_body("the engine is not available", 503), 503)
            await (face if self.available else refusal)(scope, receive, send)

        app = guarded(answer, allowed_hosts=self._allowed_hosts, insecure=self._insecure)
        self._backend.open()
        self._port = await self._stack.enter_async_context(
            serve_app(app, host=self._host, port=self._port, limits=self._limits)
        )
        # Called before the server shuts down, because the server waits for its connections to be answered.
        self._stack.callback(self._backend.stop_all)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _face(self) -> ASGIApp:
        return create_app(self._backend, parsers=PARSERS)

    @property
    def url(self) -> str:
        """The address to give to a client, without ``/v1``."""
        if not self._port:
            raise RuntimeError("the engine has no address yet: use `async with engine` or `with engine.in_thread()`")
        return f"http://{self._host}:{self._port}"

    @property
    def calls(self) -> list[ScriptedCall]:
        """Every choice requested so far, in order of arrival."""
        return self._backend.calls

    @property
    def aborts(self) -> list[str]:
        """The ``rid`` prefix of every abort received; "" for an abort of all calls."""
        return self._backend.aborts

    @property
    def in_flight(self) -> int:
        """Number of choices in progress."""
        return self._backend.in_flight

    @property
    def max_in_flight(self) -> int:
        """Highest number of choices in progress at once."""
        return self._backend.max_in_flight

    @property
    def started_with(self) -> dict[str, Any]:
        """Fields of ``/server_info`` besides the model; may be added to. The default is ``sampling_defaults``
        ``openai``: a chat that omits a sampling parameter gets OpenAI's default."""
        return self._backend.started_with

    @property
    def weight_version(self) -> str:
        """Current name of the weights; ``default`` at the start."""
        return self._backend.weights.version

    @property
    def paused(self) -> str | None:
        """The mode in which generation is paused: ``abort``, ``retract`` or ``in_place``."""
        return self._backend.weights.mode

    @property
    def weight_updates(self) -> list[dict[str, Any]]:
        """The body of every weight update so far."""
        return self._backend.weight_updates

    async def wait_calls(self, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Return once ``count`` choices have been requested. Raises ``TimeoutError``."""
        await self._backend.wait_until(lambda: len(self.calls) >= count, timeout_s)

    async def wait_in_flight(self, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Return once exactly ``count`` choices are in progress. Raises ``TimeoutError``."""
        await self._backend.wait_until(lambda: self.in_flight == count, timeout_s)

    @contextmanager
    def in_thread(self) -> Iterator["ThreadedEngine"]:
        """Serve from a new thread, for code without an event loop. Raises what entering the engine raises."""
        with entered_in_thread(self, "scripted-engine") as loop:
            yield ThreadedEngine(self, loop)


class ThreadedEngine:
    """A scripted engine that runs in a thread: ``url``, its records, and blocking waits."""

    def __init__(self, engine: ScriptedEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.url = engine.url
        self._loop = loop

    @property
    def calls(self) -> list[ScriptedCall]:
        """Every choice requested so far, in order of arrival."""
        return list(self.engine.calls)

    @property
    def aborts(self) -> list[str]:
        """The ``rid`` prefix of every abort received; "" for an abort of all calls."""
        return list(self.engine.aborts)

    @property
    def in_flight(self) -> int:
        """Number of choices in progress."""
        return self.engine.in_flight

    def wait_calls(self, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Block until ``count`` choices have been requested. Raises ``TimeoutError``."""
        asyncio.run_coroutine_threadsafe(self.engine.wait_calls(count, timeout_s=timeout_s), self._loop).result()

    def wait_in_flight(self, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Block until exactly ``count`` choices are in progress. Raises ``TimeoutError``."""
        asyncio.run_coroutine_threadsafe(self.engine.wait_in_flight(count, timeout_s=timeout_s), self._loop).result()
