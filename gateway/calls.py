"""One call of an agent: sent to an engine, retried if that fails, continued if it is aborted, and recorded.

Agents never see an abort: what an engine aborts, for example for a weight update, is continued from its token ids.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any, NoReturn

import msgspec

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.capture.call_spans import CallSpan, num_sampled
from forebay.engines.capture.fill_rows import with_prompt_rows
from forebay.engines.capture.policy_calls import is_policys
from forebay.engines.capture.token_cap import was_cut
from forebay.engines.capture.turn import ABORTED, Turn
from forebay.engines.continuation.continued_call import Join, Rest
from forebay.engines.continuation.message import Whole
from forebay.engines.continuation.parts import Part
from forebay.engines.continuation.reply import Logprobs, joined_reply
from forebay.engines.dialect import CHATS, PLAIN, SGLANG
from forebay.engines.pool import Member, Target
from forebay.engines.read_json import read_object
from forebay.engines.router_workers import UNAVAILABLE_STATUSES, status_error
from forebay.gateway.engine_http import EngineBroken, EngineReply, Headers, IncomingReply
from forebay.gateway.engine_request import EngineRequest
from forebay.gateway.off_loop import off_loop, off_loop_if
from forebay.gateway.recording import CallRecording
from forebay.gateway.refusals import EngineLost, Over
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.run_trace import Up
from forebay.gateway.runs.sessions import Session
from forebay.telemetry.tracing.spans import SpanHandle

MAX_BROKEN = 3
"""Broken connections after which a call fails, so that a call that crashes engines does not reach all of them."""
BEYOND_STATUSES = 600
ID_HEADER = b"x-forebay-rollout-id"
"""The only header that the gateway adds to an engine's reply."""

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode


class EngineRefused(Exception):
    """The engine's reply is not the requested one; the agent gets it unchanged."""

    def __init__(self, reply: EngineReply) -> None:
        super().__init__(reply.status)
        self.reply = reply

    @property
    def kind(self) -> str:
        """``agent`` if the engine rejected the request as invalid, otherwise ``engine``."""
        is_refused = HTTPStatus.BAD_REQUEST <= self.reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
        return "agent" if is_refused else "engine"

    @property
    def message(self) -> str:
        """The beginning of the engine's reply."""
        return self.reply.content[:1_000].decode(errors="replace")


class RowsRefused(EngineRefused):
    """The engine refused a request for rows behind its prompt: it is sent again at once."""

    def __init__(self) -> None:
        super().__init__(EngineReply(HTTPStatus.BAD_REQUEST, [], b""))


def check_status(status: int) -> None:
    """Raise ``EngineLost`` for a status that is neither 200 nor an error: a redirect, 204, an undefined status."""
    if status != HTTPStatus.OK and not HTTPStatus.BAD_REQUEST <= status < BEYOND_STATUSES:
        raise EngineLost(f"the engine answered with status {status}, which is neither success nor an error")


class EngineCall:
    """One call of a session. Use it once: with ``whole`` or ``other``. ``traceparent`` is the agent's header."""

    def __init__(self, run: GatewayRun, session: Session, traceparent: str | None = None) -> None:
        self.session = session
        self.turns = session.turns
        self.headers: Headers = []
        """Headers of the engine's reply, once it has answered."""
        self.is_left = False
        """Whether the agent is gone."""
        self.choices: Sequence[Turn] = ()
        """The choices returned to the agent, once known."""
        self.reasoning = session.reasoning
        """None if this call's messages stay as they are."""
        self.recorded = session.recorded
        """None if this call asks for no arrays."""
        self.id_header = (ID_HEADER, session.session_id.encode())
        self._parent = session.trace.parent(traceparent)
        self._spans: list[CallSpan] = []
        """Spans of its requests to engines."""
        self._up: Up = self._parent.up
        """Parent of the recorded spans; for a chat, the span of its turn."""
        self._run = run
        self._num_broken = 0
        self._pause: Backoff | None = None

    async def whole(self, body: Json) -> Json:
        """Make a chat and return its reply. Raises ``EngineRefused``, ``EngineLost``, ``Over``."""
        recording = await self._recording(body)
        async with self._counted():
            reply, request = await self._ask(recording)
            read = await off_loop_if(recording.is_large, lambda: self._turns(recording, reply, request))
            self._check_cap(read, request)
            turns, logprobs = await self._finished(recording, read)
            if logprobs:
                reply = joined_reply(reply, turns, logprobs)
            self._record(turns, request)
            await self._answered(recording, turns)
            return recording.stripped(reply) or {}

    async def _recording(self, body: Json) -> CallRecording:
        """Begin the record of a chat, whose messages get the reasoning that the agent dropped."""
        recording = CallRecording(body, self.session.prepared(body))
        if not is_policys(body, self._run.registration.policy_models):
            self.reasoning = None
        if (memo := self.reasoning) is not None and "messages" in body:
            messages = await off_loop_if(recording.is_large, lambda: memo.restored(body["messages"]))
            recording.body = {**recording.body, "messages": messages}
        return recording

    async def _answered(self, recording: CallRecording, turns: Sequence[Turn]) -> None:
        """Keep the choices that the agent is about to get."""
        self.choices = turns
        if (memo := self.reasoning) is not None:
            await off_loop_if(recording.is_large, lambda: memo.remember(turns))

    def _record(self, turns: Sequence[Turn], request: EngineRequest) -> None:
        """Add complete turns to the record; the agent does not wait for rows that must be fetched."""
        recorded = self.recorded
        if recorded is None or not turns or recorded.gap_before(turns[0]) is None:
            self.turns.add(turns)
        else:
            self.turns.add_later(with_prompt_rows(self._run.pool.http, recorded, turns, extra_key=request.extra_key))

    async def other(self, method: str, path: str, content: bytes = b"") -> EngineReply:
        """Make a request other than a chat and return the engine's reply. Raises ``EngineLost``, ``Over``."""
        trace = self.session.trace
        async with self._counted(is_turn=False):
            while True:
                with trace.engine_wait(self._up):
                    member = await self.session.choose_engine()
                url = member.server.url
                try:
                    with self._run.pool.occupied(member), trace.engine_call(self._up, url, "") as span:
                        reply = await self._run.engine_http.ask(method, url + path, content, span.traceparent)
                        span.end(path=path, status=reply.status)
                except EngineUnavailable as error:
                    self._run.pool.failed(member)
                    await self._wait_before_retry(error)
                    continue
                check_status(reply.status)
                if reply.status == HTTPStatus.OK:
                    read_object(reply.content, "JSON object")
                else:
                    refused = EngineRefused(reply)
                    self.session.note_failure(refused.kind, reply.status, refused.message)
                return reply

    @contextmanager
    def _traced(self, *, is_turn: bool) -> Iterator[None]:
        """Record the duration of the call, as one of the rollout's turns if ``is_turn``."""
        trace = self.session.trace
        turn = self._up = trace.begin_turn(self._parent) if is_turn else self._parent.up
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            for span in self._spans:  # spans of replies that were never read
                span.end()
            if isinstance(turn, SpanHandle):
                trace.end_turn(turn, self.choices, failure)
            trace.end_call(self.choices)

    @asynccontextmanager
    async def _counted(self, *, is_turn: bool = True) -> AsyncIterator[asyncio.Timeout]:
        """Count the call as one of its session, which may end it."""
        self.session.num_calls += 1
        try:
            with self._traced(is_turn=is_turn):
                async with self.session.call() as limit:
                    yield limit
        except EngineRefused as refused:
            self.session.note_failure(refused.kind, refused.reply.status, refused.message)
            raise
        except (EngineLost, EngineError, RecursionError) as error:
            lost = error if isinstance(error, EngineLost) else EngineLost(str(error))
            self.session.note_failure("engine", lost.status, lost.message)
            if lost is error:
                raise
            raise lost from error
        except Over as over:
            # Not a failure: the rollout was closed, or the agent did not wait for the end of its stream.
            if over.is_late and not self.is_left:
                self.session.note_failure("engine", over.status, over.message)
            raise

    # --- asking engines

    async def _ask(self, recording: CallRecording) -> tuple[Json, EngineRequest]:
        """Return a whole reply, from any engine that answers."""
        while True:
            try:
                async with self._sent(recording) as request:
                    reply = await request.reply.whole()
                    request.span.note_answer()
                    return await off_loop(request.read, reply.content), request
            except RowsRefused:
                continue
            except EngineUnavailable as error:
                await self._wait_before_retry(error)

    async def _wait_before_retry(self, error: EngineUnavailable, *, is_begun: bool = False) -> None:
        """Wait before a retry. Raises ``EngineLost`` if none is left, or if the answer ``is_begun``."""
        self._num_broken += isinstance(error, EngineBroken)
        if is_begun or self._num_broken >= MAX_BROKEN:
            raise EngineLost(error.message) from error
        self._pause = self._pause or Backoff()
        with self.session.trace.engine_wait(self._up), self.session.without_engine():
            await self._pause.wait()

    @asynccontextmanager
    async def _sent(self, recording: CallRecording) -> AsyncIterator[EngineRequest]:
        """Ask the session's engine. Raises ``EngineUnavailable``; ``EngineRefused`` for any status but 200."""
        run, session = self._run, self.session
        with session.trace.engine_wait(self._up):
            member = await session.choose_engine()
            target, rid, defaults = member.server, session.next_rid(), member.defaults
            announced = run.pool.weight_version
            is_version_asked = recording.is_stream and target.dialect.has_gaps
            # Fetched before the request is sent: the version may change while tokens arrive.
            version = await run.versions.before(target.url, announced) if is_version_asked else None
            keys = run.pool.cache_keys
            if target.dialect.key_name is not None:
                await keys.prepare(target.url)
            key = keys.of(target.url)
            recorded, rows = self.recorded, await self._asking_rows(recording, target)
            body = recording.engine_body(rid, key, target.dialect, rows)
        # Checked last, because other calls may have sampled in the meantime.
        if session.cap.is_spent:
            self._break_off()
        body = {**body, **session.cap.limits(body)}
        cut_at = session.cap.cut_at(body, recording.body)
        _, extra_key = target.dialect.sent(body)
        try:
            path, body = await target.dialect.addressed(run.pool.http, target.url, body)
        except EngineUnavailable:
            run.pool.failed(member)
            raise
        began_s = time.time()
        async with self._reply(member, rid, path, body) as (reply, span):
            check_status(reply.status)
            if reply.status != HTTPStatus.OK:
                answer = await reply.whole()
                if recorded is not None and recorded.is_refusal(body, answer.content.decode(errors="replace")):
                    raise RowsRefused
                raise await self._refusal(target, recording, answer, span)
            member.recovered()
            about = (target, rid, began_s, version, extra_key, key, defaults, span, cut_at)
            try:
                yield EngineRequest(reply, *about, is_chat=path == CHATS)
            except EngineLost as error:  # a stream has the refusal as its first event
                if recorded is not None and recorded.is_refusal(body, error.message):
                    raise RowsRefused from error
                raise

    async def _asking_rows(self, recording: CallRecording, target: Target) -> Json:
        """Return the fields that ask for rows which no earlier call has returned."""
        recorded = self.recorded
        if recorded is None or not self._run.pool.arrays or target.dialect is not SGLANG:
            return {}
        await self.session.turns.drain()  # earlier calls may still be adding theirs
        return await off_loop_if(recording.is_large, lambda: recorded.asking_rows(recording.body))

    @asynccontextmanager
    async def _reply(
        self, member: Member, rid: str, path: str, body: Json
    ) -> AsyncIterator[tuple[IncomingReply, CallSpan]]:
        """Send one request; yields the reply, whatever its status, and its span. Raises ``EngineUnavailable``.

        If this block is left before the reply is complete, the call is aborted at the engine.
        """
        run, url, is_over = self._run, member.server.url, False
        trace = self.session.trace
        try:
            with (
                run.pool.occupied(member),
                self.session.asking(url, rid),
                trace.engine_call(self._up, url, rid) as span,
            ):
                self._spans.append(span)
                async with run.engine_http.reply("POST", url + path, _encode(body), span.traceparent) as reply:
                    self.headers = reply.headers
                    yield reply, span
            is_over = True
        except EngineUnavailable:
            is_over = True
            run.pool.failed(member)
            raise
        except EngineRefused:
            is_over = True
            raise
        finally:
            if not is_over:
                # SGLang notices a closed connection only at its next write, seconds later.
                run.abandon(url, rid)

    async def _refusal(self, target: Target, recording: CallRecording, reply: EngineReply, span: CallSpan) -> Exception:
        """Return the error to raise for an error status."""
        if reply.status in UNAVAILABLE_STATUSES:
            return status_error(target.url, reply.status, reply.content)
        refused = EngineRefused(reply)
        if target.dialect is PLAIN or refused.kind == "engine":
            return refused
        # SGLang quotes the rejected fields, including those added here. Resend the agent's original body to get a
        # message that the agent understands.
        url, content = target.url + CHATS, _encode(recording.body)
        plain = await self._run.engine_http.ask("POST", url, content, span.traceparent)
        return refused if plain.status == HTTPStatus.OK else EngineRefused(plain)

    # --- continuing after an abort

    async def _finished(self, recording: CallRecording, turns: Sequence[Turn]) -> tuple[list[Turn], Logprobs]:
        """Complete the turns that the engine aborted; also returns the logprobs of their later parts.

        Raises ``EngineLost`` if the engine keeps aborting.
        """
        body = {name: value for name, value in recording.body.items() if name not in ("stream", "stream_options")}
        rests = [Rest(body, turn) for turn in turns if self._must_continue(turn)]
        try:
            whole = await asyncio.gather(*(rest.finish(self._ask_part, self._joined, self._wait) for rest in rests))
        except EngineError as error:
            raise EngineLost(error.message) from error
        self.session.counters["continued"] += len(rests)
        ended = {rest.choice: turn for rest, turn in zip(rests, whole, strict=True)}
        logprobs = {rest.choice: rest.parts.logprobs for rest in rests}
        return [ended.get(turn.choice, turn) for turn in turns], logprobs

    def _must_continue(self, turn: Turn) -> bool:
        return turn.finish_reason == ABORTED and not self.session.is_given_up and not self.is_left

    async def _ask_part(self, body: Json) -> Part:
        recording = CallRecording(body, body)
        reply, request = await self._ask(recording)
        turns = self._turns(recording, reply, request)
        self._check_cap(turns, request)
        return Part(reply, turns)

    def _check_cap(self, turns: Sequence[Turn], request: EngineRequest) -> None:
        """Count sampled tokens. Raises ``Over`` if the cap, not the agent's limit, ended a choice."""
        self.session.cap.num_sampled += sum(map(num_sampled, turns))
        if was_cut(turns, request.cut_at):
            self._break_off()

    def _break_off(self) -> NoReturn:
        self._run.capped.add(self.session.session_id)
        self.session.end_capped()

    def _turns(self, recording: CallRecording, reply: Json, request: EngineRequest) -> list[Turn]:
        with request.span.failing():
            turns = recording.turns(reply, request)
            request.span.end(turns)
        return self._run.pool.judged(request.key, turns)

    async def _wait(self, pause_s: float) -> None:
        with self.session.trace.engine_wait(self._up):
            await asyncio.sleep(pause_s)

    async def _joined(self, join: Join) -> Whole | None:
        url = join.turn.engine_url
        with self.session.trace.engine_call(self._up, url, "") as span:
            pool = self._run.pool
            message = await pool.dialect_at(url).whole_message(pool.http, url, join.turn, join.body)
            span.end(path="/detokenize")
        return message
