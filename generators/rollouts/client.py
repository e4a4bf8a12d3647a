"""The ``openai`` clients that rollout functions are given, each bound to one rollout."""

import asyncio
from typing import Any, Self

import httpx2
import openai

from forebay.core.backoff import Backoff
from forebay.engines.connections import names_proxies
from forebay.engines.continuation.continued_call import finish, finish_in_thread
from forebay.engines.continuation.parts import Json, Part
from forebay.engines.router_workers import root_url
from forebay.generators.rollouts.connections import RolloutConnections, ThreadConnections
from forebay.generators.rollouts.engine_calls import CutShort, EngineCalls, is_unavailable
from forebay.generators.rollouts.recorded_streams import AsyncRecordedStream, RecordedStream
from forebay.generators.rollouts.recording import CallRecorder
from forebay.generators.rollouts.rollout import Rollout
from forebay.generators.rollouts.whole_chat import WholeChat, is_whole_chat

UNBOUND_URL = "http://engine.invalid/v1"
"""Stands in the client that the others are made from; each request is given a real address."""


class RolloutClient(openai.OpenAI):
    """The client of a rollout function that runs in a thread. ``rollout`` is the execution that it belongs to."""

    rollout: Rollout

    def copy(self, **changed: Any) -> Self:
        """As in the ``openai`` package; the copy belongs to the same rollout."""
        client = super().copy(**changed)
        client.rollout = self.rollout
        return client

    with_options = copy

    def bound_to(self, rollout: Rollout) -> Self:
        """A client for ``rollout`` over the same connections."""
        client = super().copy(base_url=f"{rollout.engine_url}/v1")
        client.rollout = rollout
        return client

    def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        """Send one call; what an engine aborts of a chat in one piece is gone on with."""
        if not is_whole_chat(options, is_stream=bool(how.get("stream"))):
            return self._answered(cast_to, options, **how)[0]
        chat = WholeChat(self.rollout, options)

        def ask(body: Json | None = None) -> Part:
            raw, recorder = self._answered(cast_to, chat.options(body), is_whole=True, **how)
            part: Part = recorder.part(raw)
            return part

        try:
            for rest in chat.rests(ask()):
                finish_in_thread(rest, ask, lambda join: self.rollout.calls.in_loop(chat.joined(join)))
        finally:
            chat.record()
        return chat.reply()

    def _answered(self, cast_to: Any, options: Any, *, is_whole: bool = False, **how: Any) -> tuple[Any, Any]:
        """The reply of whichever engine answers, and what records it if it is a chat. Waits for one if none does."""
        calls, pause = self.rollout.calls, Backoff()
        while True:
            calls.wait_open()
            try:
                with calls.one_call(options, self.timeout) as bound:
                    sent, recorder = bound, CallRecorder.of(self.rollout, bound, options)
                    if recorder is not None and how.get("stream"):
                        calls.in_loop(recorder.note_version())
                        how["stream_cls"] = type("RecordedStream", (RecordedStream,), {"recorder": recorder})
                    elif recorder is not None and is_whole:
                        sent = recorder.outgoing(bound)
                    return super().request(cast_to, sent, **how), recorder
            except openai.APIError as error:
                if not is_unavailable(error):
                    raise
            except CutShort:
                continue
            calls.in_loop(_replaced(calls, pause))


class AsyncRolloutClient(openai.AsyncOpenAI):
    """The client of an ``async`` rollout function. ``rollout`` is the execution that it belongs to."""

    rollout: Rollout

    def copy(self, **changed: Any) -> Self:
        """As in the ``openai`` package; the copy belongs to the same rollout."""
        client = super().copy(**changed)
        client.rollout = self.rollout
        return client

    with_options = copy

    def bound_to(self, rollout: Rollout) -> Self:
        """A client for ``rollout`` over the same connections."""
        client = super().copy(base_url=f"{rollout.engine_url}/v1")
        client.rollout = rollout
        return client

    async def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        """Send one call; what an engine aborts of a chat in one piece is gone on with."""
        if not is_whole_chat(options, is_stream=bool(how.get("stream"))):
            return (await self._answered(cast_to, options, **how))[0]
        chat = WholeChat(self.rollout, options)

        async def ask(body: Json | None = None) -> Part:
            raw, recorder = await self._answered(cast_to, chat.options(body), is_whole=True, **how)
            part: Part = recorder.part(raw)
            return part

        try:
            for rest in chat.rests(await ask()):
                await finish(rest, ask, chat.joined)
        finally:
            chat.record()
        return chat.reply()

    async def _answered(self, cast_to: Any, options: Any, *, is_whole: bool = False, **how: Any) -> tuple[Any, Any]:
        """The reply of whichever engine answers, and what records it if it is a chat. Waits for one if none does."""
        calls, pause = self.rollout.calls, Backoff()
        while True:
            await calls.when_open()
            try:
                with calls.one_call(options, self.timeout) as bound:
                    sent, recorder = bound, CallRecorder.of(self.rollout, bound, options)
                    if recorder is not None and how.get("stream"):
                        await recorder.note_version()
                        how["stream_cls"] = type("RecordedStream", (AsyncRecordedStream,), {"recorder": recorder})
                    elif recorder is not None and recorder.renders and is_whole:
                        sent = await asyncio.to_thread(recorder.outgoing, bound)
                    return await super().request(cast_to, sent, **how), recorder
            except openai.APIError as error:
                if not is_unavailable(error):
                    raise
            except CutShort:
                continue
            await _replaced(calls, pause)


class OwnClient(openai.OpenAI):
    """The client of a generator that runs its rollouts itself. Unlike others of the package, it pickles.

    A worker process gets a client of its own for the same engine, whatever ``multiprocessing`` starts it by.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return make_own_client, (str(self.base_url), self.api_key)


async def _replaced(calls: EngineCalls, pause: Backoff) -> None:
    """An engine that answers its probe and refuses its calls must not be asked in a tight loop."""
    with calls.group.working():
        await pause.wait()
        await calls.replace_engine()


def make_client(api_key: str | None) -> RolloutClient:
    """The client that those of the rollouts are copies of. The environment's key never travels to an engine."""
    http = None if names_proxies() else httpx2.Client(transport=ThreadConnections(), follow_redirects=True)
    return RolloutClient(**_common(api_key), http_client=http)


def make_own_client(url: str, api_key: str | None) -> OwnClient:
    """A client for the engine at ``url``, with or without ``/v1``. Raises ``InvalidInput``."""
    return OwnClient(base_url=f"{root_url(url)}/v1", api_key=api_key or "none")


def make_async_client(api_key: str | None) -> AsyncRolloutClient:
    """The same for ``async`` rollout functions."""
    http = None if names_proxies() else httpx2.AsyncClient(transport=RolloutConnections(), follow_redirects=True)
    return AsyncRolloutClient(**_common(api_key), http_client=http)


def _common(api_key: str | None) -> dict[str, Any]:
    return {"base_url": UNBOUND_URL, "api_key": api_key or "none", "max_retries": 0, "timeout": None}
