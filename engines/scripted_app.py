"""What a scripted engine answers on the wire: chats, aborts, loads, model info, health."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forebay.engines.scripted_wire import completion, error_body, event_stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of a script.

    ``delay_s`` seconds pass before it; an abort in that time leaves as much of the words as the time that has passed.
    ``hang`` never answers, and an abort leaves ``text``. An ``error_status`` is answered with ``text`` as the message.
    """

    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str | None = None
    delay_s: float = 0.0
    hang: bool = False
    error_status: int | None = None

    @property
    def reason(self) -> str:
        """``finish_reason`` as given, else ``tool_calls`` or ``stop``."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


@dataclass(slots=True, eq=False)
class ScriptedCall:
    """One choice that a script is asked for: ``number`` counts them from 0, ``choice`` those of one chat."""

    number: int
    choice: int
    body: dict[str, Any]
    finished: str | None = None
    """How it ended: a finish reason, ``error`` or ``disconnected``; ``None`` while it runs."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def rid(self) -> str | None:
        """The request id that the client gave."""
        return self.body.get("rid")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the chat."""
        return list(self.body["messages"])

    @property
    def prompt(self) -> str:
        """The content of the last message."""
        return str(self.messages[-1].get("content") or "")


Answer = str | Reply
Script = Callable[[ScriptedCall], Answer | Awaitable[Answer]]


class ScriptedApp:
    """The ASGI application behind a ``ScriptedEngine``, and what it has recorded."""

    def __init__(self, script: Script, model: str) -> None:
        self.calls: list[ScriptedCall] = []
        self.aborts: list[str] = []
        self.available = True
        self.max_in_flight = 0
        self._script = script
        self._model = model
        self._running: set[ScriptedCall] = set()
        self._routes = Starlette(routes=self._route_list())

    @property
    def in_flight(self) -> int:
        """The choices being worked on now."""
        return len(self._running)

    def open(self) -> None:
        """Get ready for the event loop that is going to serve."""
        self._changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.available:
            await self._routes(scope, receive, send)
        else:
            await JSONResponse(error_body(503, "the engine is not available"), 503)(scope, receive, send)

    def stop_all(self) -> None:
        """Abort every call that runs."""
        for call in self._running:
            call.aborted.set()

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Return once ``holds()`` is true; looked at whenever a call begins or ends. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(holds)

    def _route_list(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/model_info", self._model_info),
            Route("/v1/loads", self._loads),
            Route("/abort_request", self._abort, methods=["POST"]),
            Route("/health", self._health),
        ]

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(body, dict) or not body.get("messages"):
            return JSONResponse(error_body(400, "messages is required"), 400)
        work = asyncio.create_task(self._replies(body))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            # Nobody reads the answer to a client that has gone.
            return self._answer(body, work.result()) if work.done() else Response(status_code=499)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _answer(self, body: dict[str, Any], replies: list[Reply]) -> Response:
        failed = next((reply for reply in replies if reply.error_status), None)
        if failed is not None and failed.error_status is not None:
            return JSONResponse(error_body(failed.error_status, failed.text), failed.error_status)
        whole = completion(body, self._model, [(reply.text, reply.tool_calls, reply.reason) for reply in replies])
        if body.get("stream"):
            return Response(event_stream(whole), media_type="text/event-stream")
        return JSONResponse(whole)

    async def _replies(self, body: dict[str, Any]) -> list[Reply]:
        first = len(self.calls)
        calls = [ScriptedCall(first + choice, choice, body) for choice in range(body.get("n") or 1)]
        self.calls.extend(calls)
        self._running.update(calls)
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        await self._tell_change()
        return list(await asyncio.gather(*map(self._run, calls)))

    async def _run(self, call: ScriptedCall) -> Reply:
        call.finished = "disconnected"
        try:
            reply = await self._outcome(call)
            call.finished = "error" if reply.error_status else reply.reason
            return reply
        finally:
            self._running.discard(call)
            await self._tell_change()

    async def _outcome(self, call: ScriptedCall) -> Reply:
        asking = asyncio.create_task(self._ask(call))
        stopped = asyncio.create_task(call.aborted.wait())
        try:
            await asyncio.wait({asking, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return Reply(finish_reason="abort")
            return await _played(asking.result(), call.aborted)
        finally:
            asking.cancel()
            stopped.cancel()

    async def _ask(self, call: ScriptedCall) -> Reply:
        try:
            answer = self._script(call)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:  # the script is the user's: its error is the answer, and is told
            logger.warning("the script raised on call %d", call.number, exc_info=True)
            return Reply(text=f"the script raised {error!r}", error_status=500)
        return Reply(text=answer) if isinstance(answer, str) else answer

    async def _tell_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _abort(self, request: Request) -> Response:
        body = await request.json()
        prefix = "" if body.get("abort_all") else body.get("rid") or None
        if prefix is not None:
            self.aborts.append(prefix)
            for call in self._running:
                if (call.rid or "").startswith(prefix):
                    call.aborted.set()
        return Response(status_code=200)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "forebay"}]})

    async def _model_info(self, _: Request) -> Response:
        info = {"model_path": self._model, "served_model_name": self._model, "weight_version": "default"}
        return JSONResponse({**info, "is_generation": True})

    async def _loads(self, _: Request) -> Response:
        rank = {"dp_rank": 0, "num_running_reqs": self.in_flight, "num_waiting_reqs": 0}
        return JSONResponse({"version": "scripted", "loads": [rank]})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _played(reply: Reply, aborted: asyncio.Event) -> Reply:
    """Let the time of ``reply`` pass; what an abort leaves of it, if one comes."""
    if not reply.hang and not reply.delay_s:
        return reply
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with suppress(TimeoutError):
        async with asyncio.timeout(None if reply.hang else reply.delay_s):
            await aborted.wait()
            done = 1.0 if reply.hang else min((loop.time() - began_s) / reply.delay_s, 1.0)
            words = reply.text.split(" ")
            return Reply(text=" ".join(words[: int(len(words) * done)]), finish_reason="abort")
    return reply
