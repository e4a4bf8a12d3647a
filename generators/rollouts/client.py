"""The ``openai`` clients passed to rollout functions, each bound to one rollout."""

import asyncio
from collections.abc import Callable, Coroutine
from inspect import isawaitable
from typing import Any, ClassVar, Self, TypeVar

import httpx2
import openai

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineUnavailable
from forebay.engines.bounded_replies import offer_gzip, offer_gzip_async
from forebay.engines.capture.call_spans import ended
from forebay.engines.connections import names_proxies
from forebay.engines.continuation.continued_call import Join, ended_at_once
from forebay.engines.continuation.message import Whole
from forebay.engines.continuation.parts import Json, Part
from forebay.engines.router_workers import root_url
from forebay.generators.rollouts.call_failures import Attempts, checked_kind, engine_at_fault
from forebay.generators.rollouts.chat_turn import ChatTurn
from forebay.generators.rollouts.connections import (
    RolloutConnections,
    ThreadConnections,
    bound_body,
    bound_thread_body,
)
from forebay.generators.rollouts.engine_calls import EngineCalls, Repeat
from forebay.generators.rollouts.recorded_streams import AsyncRecordedStream, RecordedStream
from forebay.generators.rollouts.recording import CallRecorder
from forebay.generators.rollouts.rollout import Rollout
from forebay.generators.rollouts.whole_chat import WholeChat, is_whole_chat

T = TypeVar("T")

UNBOUND_URL = "http://engine.invalid/v1"
"""Placeholder in the client that the others are copied from; each request gets a real address."""


class _Bound:
    """A client of the ``openai`` package that belongs to a rollout.

    In a thread, nothing is really awaited: ``_wait`` blocks until the event loop has the result, so that
    ``ended_at_once`` can run the same coroutine.
    """

    rollout: Rollout
    timeout: Any
    stream_class: ClassVar[type[RecordedStream | AsyncRecordedStream]]

    def copy(self, **changed: Any) -> Self:
        """Copy the client like the ``openai`` package does; the copy belongs to the same rollout."""
        return self.bound_to(self.rollout, **changed)

    with_options = copy

    def bound_to(self, rollout: Rollout, **changed: Any) -> Self:
        """Return a client for ``rollout`` that uses the same connections."""
        client: Self = super().copy(**changed)  # type: ignore[misc] # of the package's class, which comes second
        client.rollout = rollout
        return client

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the event loop."""
        return await work

    async def _requested(self, cast_to: Any, options: Any, **how: Any) -> Any:
        """Send one call. A non-streamed chat that the engine aborts is continued."""
        if not is_whole_chat(options, is_stream=bool(how.get("stream"))):
            with self.rollout.turn(options) as turn:
                return (await self._answered(cast_to, options, turn, **how))[0]
        chat = WholeChat(self.rollout, options)

        async def ask(body: Json | None = None) -> Part:
            raw, recorder = await self._answered(cast_to, chat.options(body), turn, is_whole=True, **how)
            if not recorder.asks_rows:
                part: Part = recorder.part(raw)
                return part
            # With rows, a reply may have tens of megabytes.
            return await self._wait(recorder.completed(await self._wait(asyncio.to_thread(recorder.part, raw))))

        async def join(parts: Join) -> Whole | None:
            return await self._wait(chat.joined(parts))

        async def pause(seconds: float) -> None:
            with ended(self.rollout.trace.begin("engine_wait", up=turn.span)):
                await self._wait(asyncio.sleep(seconds))

        with self.rollout.turn(options) as turn:
            try:
                for rest in chat.rests(await ask()):
                    await rest.finish(ask, join, pause)
            finally:
                chat.record()
            turn.end(chat.turns)
            return chat.reply()

    async def _answered(
        self, cast_to: Any, options: Any, turn: ChatTurn, *, is_whole: bool = False, **how: Any
    ) -> tuple[Any, Any]:
        """Return the reply and, for a chat, its recorder. Retries on other engines and waits while none answers."""
        calls, pause, attempts = self.rollout.calls, Backoff(), Attempts()
        while True:
            if not calls.is_open:
                await self._wait(calls.when_open(turn.span))
            try:
                with calls.one_call(options, self.timeout, turn) as bound:
                    sent, recorder = bound, CallRecorder.of(self.rollout, bound, options, turn)
                    if recorder is not None and how.get("stream"):
                        await self._wait(recorder.note_version())
                        how["stream_cls"] = type("RecordedStream", (self.stream_class,), {"recorder": recorder})
                    elif recorder is not None and recorder.renders and is_whole:
                        sent = await self._wait(recorder.outgoing(bound))
                    with engine_at_fault():
                        reply: Any = super().request(cast_to, sent, **how)  # type: ignore[misc] # as in bound_to
                        reply = checked_kind(cast_to, await reply if isawaitable(reply) else reply)
                    if isinstance(reply, RecordedStream):
                        reply.begin()
                    elif isinstance(reply, AsyncRecordedStream):
                        await reply.begin()
                    turn.note_answer(is_whole=is_whole)
                    return reply, recorder
            except (openai.APIError, EngineUnavailable) as error:
                attempts.check(error)
            except Repeat:
                continue
            await self._wait(_replaced(calls, pause, turn))


class RolloutClient(_Bound, openai.OpenAI):
    """Client of a rollout function that runs in a thread. ``rollout`` is the execution that it belongs to."""

    stream_class = RecordedStream

    def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        """Send one call. A non-streamed chat that the engine aborts is continued."""
        return ended_at_once(self._requested(cast_to, options, **how))

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.rollout.calls.in_loop(work)


class AsyncRolloutClient(_Bound, openai.AsyncOpenAI):
    """Client of an ``async`` rollout function. ``rollout`` is the execution that it belongs to."""

    stream_class = AsyncRecordedStream

    async def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        """Send one call. A non-streamed chat that the engine aborts is continued."""
        return await self._requested(cast_to, options, **how)


class OwnClient(openai.OpenAI):
    """Client of a generator that runs its rollouts itself. Unlike the package's own clients, it can be pickled.

    A worker process gets its own client for the same engine with any ``multiprocessing`` start method.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return make_own_client, (str(self.base_url), self.api_key)


async def _replaced(calls: EngineCalls, pause: Backoff, turn: ChatTurn) -> None:
    """Wait with back-off, then replace the engine: one that passes probes but fails calls needs the pause."""
    with calls.without_engine(), ended(calls.trace.begin("engine_wait", up=turn.span)):
        await pause.wait()
        await calls.replace_engine()


def make_client(api_key: str | None) -> RolloutClient:
    """Return the client that rollouts' clients are copied from. It never sends the environment's key to an engine."""
    hooks: dict[str, list[Callable[..., Any]]] = {"request": [offer_gzip], "response": [bound_thread_body]}
    options: dict[str, Any] = {"event_hooks": hooks} if names_proxies() else {"transport": ThreadConnections()}
    http = httpx2.Client(follow_redirects=True, **options)
    return RolloutClient(**_common(api_key), http_client=http)


def make_own_client(url: str, api_key: str | None) -> OwnClient:
    """Return a client for the engine at ``url``, with or without ``/v1``. Raises ``InvalidInput``."""
    return OwnClient(base_url=f"{root_url(url)}/v1", api_key=api_key or "none")


def make_async_client(api_key: str | None) -> AsyncRolloutClient:
    """Return the client that clients of ``async`` rollout functions are copied from."""
    hooks: dict[str, list[Callable[..., Any]]] = {"request": [offer_gzip_async], "response": [bound_body]}
    options: dict[str, Any] = {"event_hooks": hooks} if names_proxies() else {"transport": RolloutConnections()}
    http = httpx2.AsyncClient(follow_redirects=True, **options)
    return AsyncRolloutClient(**_common(api_key), http_client=http)


def _common(api_key: str | None) -> dict[str, Any]:
    return {"base_url": UNBOUND_URL, "api_key": api_key or "none", "max_retries": 0, "timeout": None}
