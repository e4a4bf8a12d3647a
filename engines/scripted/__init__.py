"""An engine whose answers come from a Python function, behind a real HTTP server. For tests, ours and users'.

A request comes in at the face (``fake_sglang``), which hands each of its prompts to ``ScriptedBackend`` as a call.
For each choice of a call that makes a ``ScriptedCall`` and asks the script, as soon as no pause forbids it. The reply
is spelled in tokens and said over its time, all at once unless it has a speed; what was said since the last time goes
back to the face as a piece, which it writes as a chunk or keeps for the whole body. An abort, a pause or new weights
fall into the middle of it, as they would in a model.

- ``ScriptedEngine`` (here): the server; what it was asked, waits for it, and a thread of its own.
- ``answers``: the choices in flight, and what aborts, pauses and updates do to them.
- ``script``: what a script is asked, what it answers, and how that is read out of a text again.
- ``play``: saying one reply.
- ``tokens``: the vocabulary, the chat template, and logprobs.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Self

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from forebay.core.addresses import host_patterns
from forebay.engines.fake_sglang.reply_bodies import error_body
from forebay.engines.fake_sglang.routes import create_app, guarded
from forebay.engines.scripted.answers import ScriptedBackend
from forebay.engines.scripted.script import PARSERS, Reply, Script, ScriptedCall
from forebay.web.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from forebay.web.serving import entered_in_thread, serve_app

__all__ = ["Reply", "Script", "ScriptedCall", "ScriptedEngine", "ThreadedEngine"]

WAIT_LIMIT_S = 30.0
"""For what takes milliseconds on an idle machine, and much longer on one with other work."""


class ScriptedEngine:
    """A server on a free port (or ``port``) of ``host`` that speaks SGLang's wire and answers what ``script`` says.

    ``script(call)`` is asked once for every choice of a chat and returns a text or a ``Reply``; it may be a coroutine
    function. Enter with ``async with``, or with ``with engine.in_thread()`` where no event loop runs::

        async with ScriptedEngine(lambda call: "4") as engine:
            ...  # engine.url, engine.calls, engine.aborts

    Leaving stops every call that runs. Can be entered again, on the same port. Entering raises ``InvalidInput`` that
    tells why it cannot listen on ``port``.

    Pages in a browser are refused. It may be called by IP address, by this machine's own names and by those of
    ``allowed_hosts`` (``.name`` stands for all that end so); with ``insecure`` by any. Raises ``InvalidInput`` for what
    is no name.

    Without parsers (``has_parsers``) its streams leave out, as SGLang's then do, the logprobs of tokens without a text,
    the end token for one. Without metrics (``has_metrics``) its replies do not tell how long a call stood in the queue,
    was read and was generated. ``max_running`` calls are worked on at once, and the others stand in a queue.
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
        """Set it to false to answer 503 to everything."""
        self._backend = ScriptedBackend(
            script, model, has_parsers=has_parsers, has_metrics=has_metrics, max_running=max_running
        )
        self._host, self._port = host, port
        self._limits = limits
        self._stack = AsyncExitStack()
        self._allowed_hosts = host_patterns(allowed_hosts)
        self._insecure = insecure

    async def __aenter__(self) -> Self:
        face = create_app(self._backend, parsers=PARSERS)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            refusal = JSONResponse(error_body("the engine is not available", 503), 503)
            await (face if self.available else refusal)(scope, receive, send)

        app = guarded(answer, allowed_hosts=self._allowed_hosts, insecure=self._insecure)
        self._backend.open()
        self._port = await self._stack.enter_async_context(
            serve_app(app, host=self._host, port=self._port, limits=self._limits)
        )
        # Called before the server shuts down: it waits for its connections, and those wait for their answers.
        self._stack.callback(self._backend.stop_all)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The address to give to a client, without ``/v1``."""
        if not self._port:
            raise RuntimeError("the engine has no address yet: use `async with engine` or `with engine.in_thread()`")
        return f"http://{self._host}:{self._port}"

    @property
    def calls(self) -> list[ScriptedCall]:
        """Every choice asked for so far, in order of arrival."""
        return self._backend.calls

    @property
    def aborts(self) -> list[str]:
        """The ``rid`` prefix of every abort received; the empty text for one that meant all."""
        return self._backend.aborts

    @property
    def in_flight(self) -> int:
        """The choices being worked on now."""
        return self._backend.in_flight

    @property
    def max_in_flight(self) -> int:
        """The most choices that were ever worked on at once."""
        return self._backend.max_in_flight

    @property
    def started_with(self) -> dict[str, Any]:
        """What ``/server_info`` tells beside the model; may be added to. By default it is ``sampling_defaults``
        ``openai``: a chat that leaves out a sampling parameter gets OpenAI's."""
        return self._backend.started_with

    @property
    def weight_version(self) -> str:
        """What the weights are called now; ``default`` at the start."""
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
        """Return once ``count`` choices have been asked for. Raises ``TimeoutError``."""
        await self._backend.wait_until(lambda: len(self.calls) >= count, timeout_s)

    async def wait_in_flight(self, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Return once exactly ``count`` choices are being worked on. Raises ``TimeoutError``."""
        await self._backend.wait_until(lambda: self.in_flight == count, timeout_s)

    @contextmanager
    def in_thread(self) -> Iterator["ThreadedEngine"]:
        """Serve from a thread of its own, for code without an event loop. Raises what entering it raises, here."""
        with entered_in_thread(self, "scripted-engine") as loop:
            yield ThreadedEngine(self, loop)


class ThreadedEngine:
    """A scripted engine that runs in a thread: ``url``, what it recorded, and waits that block."""

    def __init__(self, engine: ScriptedEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.url = engine.url
        self._loop = loop

    @property
    def calls(self) -> list[ScriptedCall]:
        """Every choice asked for so far, in order of arrival."""
        return list(self.engine.calls)

    @property
    def aborts(self) -> list[str]:
        """The ``rid`` prefix of every abort received; the empty text for one that meant all."""
        return list(self.engine.aborts)

    @property
    def in_flight(self) -> int:
        """The choices being worked on now."""
        return self.engine.in_flight

    def wait_calls(self, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Block until ``count`` choices have been asked for. Raises ``TimeoutError``."""
        asyncio.run_coroutine_threadsafe(self.engine.wait_calls(count, timeout_s=timeout_s), self._loop).result()

    def wait_in_flight(self, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Block until exactly ``count`` choices are being worked on. Raises ``TimeoutError``."""
        asyncio.run_coroutine_threadsafe(self.engine.wait_in_flight(count, timeout_s=timeout_s), self._loop).result()
