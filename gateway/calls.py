"""One call of an agent: asked of an engine, tried again before its first byte, gone on with if aborted, recorded.

Going on with an answer that an engine aborted, for a weight update say: agents never see an abort.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.admin import WorkerAdmin
from forebay.engines.capture.segments import ABORTED
from forebay.engines.capture.turn import Turn
from forebay.engines.continuation.message import Whole, whole_message
from forebay.engines.continuation.parts import Part
from forebay.engines.continuation.reply import Logprobs, joined_reply
from forebay.engines.continuation.rest import Join, Rest, finish
from forebay.gateway.engine_http import Answer, Broken, Headers
from forebay.gateway.engine_request import EngineRefused, Sent, send
from forebay.gateway.recording import Wire
from forebay.gateway.refusals import EngineLost, Over
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.sessions import Session

Json = dict[str, Any]
Ask = Callable[[Json], Awaitable[Part]]
"""Asks an engine for a whole chat completion."""


class Continuation:
    """The rest of one choice, gone on with as rollout functions' own calls are.

    ``body`` is the chat that was asked for, ``turn`` what came of it before the abort. ``http`` are connections for
    administrative calls.
    """

    def __init__(self, ask: Ask, http: httpx.AsyncClient, body: Json, turn: Turn) -> None:
        self._ask = ask
        self._http = http
        self._rest = Rest(body, turn)

    @property
    def logprobs(self) -> list[Json]:
        """What the parts after the first told beside each token, as chats tell it."""
        return self._rest.parts.logprobs

    async def run(self) -> Turn:
        """The whole turn, with its message. Raises ``EngineLost`` if the engine aborts again and again."""
        try:
            return await finish(self._rest, self._ask, self._joined)
        except EngineError as error:
            raise EngineLost(error.message) from error

    async def _joined(self, join: Join) -> Whole | None:
        return await whole_message(WorkerAdmin(self._http, join.turn.engine_url), join.turn, join.body)


MAX_BROKEN = 3
"""So often may a connection break under a call: one that kills its engine must not go from engine to engine."""


_decode = msgspec.json.Decoder(Json).decode


class EngineCall:
    """One call of a session. Use it once: with ``whole`` or ``other``."""

    def __init__(self, run: GatewayRun, session: Session) -> None:
        self.session = session
        self.headers: Headers = []
        """Of the engine's reply, once it has answered."""
        self.is_left = False
        """The agent is gone."""
        self._run = run
        self._num_broken = 0
        self._pause = Backoff()

    async def whole(self, told: Json) -> Json:
        """The reply to the chat ``told``. Raises ``EngineRefused``, ``EngineLost``, ``Over``."""
        wire = Wire(told, self.session.prepared(told))
        async with self._counted():
            reply, sent = await self._ask(wire)
            turns = wire.turns(reply, sent.rid, sent.target.url, sent.began_s)
            turns, logprobs = await self._gone_on(wire, turns)
            if logprobs:
                reply = joined_reply(reply, turns, logprobs)
            self.session.turns.add(turns)
            return wire.stripped(reply) or {}

    async def other(self, method: str, path: str, content: bytes = b"") -> Answer:
        """The engine's reply to something that is no chat. Raises ``EngineLost``, ``Over``."""
        async with self._counted():
            while True:
                member = await self.session.affinity.choose()
                try:
                    with self._run.ring.occupied(member):
                        answer = await self._run.upstream.ask(method, member.server.url + path, content)
                except EngineUnavailable as error:
                    member.failed()
                    await self._stand(error)
                    continue
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    refused = EngineRefused(answer)
                    self.session.note_failure(refused.kind, answer.status, refused.told)
                return answer

    async def _ask(self, wire: Wire) -> tuple[Json, Sent]:
        """A whole reply, from whichever engine gives it."""
        while True:
            try:
                async with self._sent(wire) as sent:
                    return self._decoded(await sent.reply.whole()), sent
            except EngineUnavailable as error:
                await self._stand(error)

    async def _gone_on(self, wire: Wire, turns: Sequence[Turn]) -> tuple[list[Turn], Logprobs]:
        """The turns with those that the engine aborted come to their end; what the later parts told of tokens."""
        body = {name: value for name, value in wire.body.items() if name not in ("stream", "stream_options")}
        aborted = [turn for turn in turns if self._is_to_go_on(turn)]
        rests = {turn.choice: Continuation(self._ask_rest, self._run.ring.http, body, turn) for turn in aborted}
        whole = await asyncio.gather(*(rest.run() for rest in rests.values()))
        ended = dict(zip(rests, whole, strict=True))
        self.session.counters["continued"] += len(ended)
        return [ended.get(turn.choice, turn) for turn in turns], {c: rest.logprobs for c, rest in rests.items()}

    def _is_to_go_on(self, turn: Turn) -> bool:
        return turn.finish_reason == ABORTED and not self.session.is_given_up and not self.is_left

    async def _ask_rest(self, body: Json) -> Part:
        wire = Wire(body, body)
        reply, sent = await self._ask(wire)
        return Part(reply, wire.turns(reply, sent.rid, sent.target.url, sent.began_s))

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[asyncio.Timeout]:
        """Around the call: it is one of its session's, which may end it."""
        self.session.num_calls += 1
        try:
            async with self.session.call() as limit:
                yield limit
        except EngineRefused as refused:
            self.session.note_failure(refused.kind, refused.answer.status, refused.told)
            raise
        except EngineLost as lost:
            self.session.note_failure("engine", lost.status, lost.message)
            raise
        except Over as over:
            if over.is_late and not self.is_left:
                self.session.note_failure("engine", over.status, over.message)
            raise

    @asynccontextmanager
    async def _sent(self, wire: Wire) -> AsyncIterator[Sent]:
        async with send(self._run, self.session, wire) as sent:
            self.headers = sent.reply.headers
            yield sent

    def _decoded(self, answer: Answer) -> Json:
        try:
            return _decode(answer.content)
        except msgspec.DecodeError:
            raise EngineRefused(answer) from None

    async def _stand(self, error: EngineUnavailable, *, is_begun: bool = False) -> None:
        """Wait before the next try. Raises ``EngineLost`` if there is none."""
        self._num_broken += isinstance(error, Broken)
        if is_begun or self._num_broken >= MAX_BROKEN:
            raise EngineLost(error.message) from error
        await self._pause.wait()
