"""Recording of a rollout's engine calls: each chat, streamed or not, becomes turns of the trajectory."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import httpx2
import openai
from openai.types.chat import ChatCompletionChunk

from forebay.core.addresses import without_login
from forebay.core.errors import EngineError
from forebay.engines.capture.call_spans import ended
from forebay.engines.capture.fill_gaps import complete
from forebay.engines.capture.fill_rows import with_prompt_rows
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.read_stream import StreamReader
from forebay.engines.capture.reply_shape import CHUNK, check_chunk, check_has_choice, read_chat
from forebay.engines.capture.request_fields import ROUTED_START, strip
from forebay.engines.capture.sampling_params import drawn, sampling_of
from forebay.engines.capture.turn import Turn
from forebay.engines.chat_over_generate import TemplatedCall, with_body
from forebay.engines.continuation.parts import Part
from forebay.engines.continuation.vllm import as_chat
from forebay.engines.dialect import CHATS
from forebay.engines.read_json import UNREADABLE, unreadable
from forebay.generators.rollouts.chat_turn import ChatTurn
from forebay.generators.rollouts.engine_calls import CHAT_PATH, body_of
from forebay.generators.rollouts.rollout import OpenStream, Rollout

logger = logging.getLogger(__name__)


class CallRecorder:
    """Records one chat of a rollout. ``sent`` is the body sent to ``url``; ``options`` are the user's own options."""

    def __init__(
        self,
        rollout: Rollout,
        url: str,
        sent: Mapping[str, Any],
        options: Any,
        turn: ChatTurn,
    ) -> None:
        self._rollout = rollout
        self._calls = rollout.calls
        self._dialect = dialect = rollout.calls.target.dialect
        self._has_gaps = dialect.has_gaps
        self._url = url
        self._sent = sent
        self._options, self._client_body = options, body_of(options)
        rid, self._extra_key = dialect.sent(sent)
        self._call = (url, str(rid))
        self._origin: dict[str, Any] = {"rid": rid, "engine_url": url, "began_s": time.time()}
        self._reader = StreamReader(sent, **self._origin)
        self._key = self._calls.key_of(url, self._extra_key)
        self._version: str | None = None
        self._turns: list[Turn] = []
        self._is_ended = False
        self._defaults = self._calls.defaults
        self._template = self._calls.template_at(url)
        self._cut_at = self._calls.cap.cut_at(sent, self._client_body)
        self._withheld: list[ChatCompletionChunk] = []
        self._templated: TemplatedCall | None = None
        self._is_chat = True
        assert turn.call is not None
        self._turn = turn
        self._span = turn.call

    @classmethod
    def of(cls, rollout: Rollout, bound: Any, options: Any, turn: ChatTurn) -> Self | None:
        """Return a recorder for the call sent as ``bound`` and requested with ``options``; None if it is not a chat."""
        if not options.url.endswith(CHAT_PATH):
            return None
        url = bound.url.removesuffix(f"/v1{CHAT_PATH}")
        return cls(rollout, url, body_of(bound), options, turn)

    @property
    def renders(self) -> bool:
        """Whether the chat must be sent as ``outgoing`` returns it."""
        return self._template is not None or bool(self._sent.get("input_ids"))

    async def outgoing(self, bound: Any) -> Any:
        """Return the call to send for a non-streamed chat: to another path if only that returns or takes the tokens."""
        if self._template is not None:
            made = await asyncio.to_thread(TemplatedCall.of, self._sent, self._client_body, self._template)
            self._templated = made
            return bound if made is None else made.options(bound, self._url)
        path, body = await self._dialect.addressed(self._calls.pool.http, self._url, dict(self._sent))
        self._is_chat = path == CHATS
        return bound.model_copy(update={"url": self._url + path, "json_data": body, "extra_json": None})

    async def note_version(self) -> None:
        """Look up the engine's weight version before a stream, because streams do not contain it."""
        self._turn.note_stream()
        if self._has_gaps:
            with self._asking():
                self._version = await self._calls.pool.weights_at(self._url)

    def part(self, raw: Any) -> Part:
        """Read a complete reply, given as the package's raw response, and count its tokens without recording them."""
        with self._span.failing():
            if self._templated is not None:
                raw.http_response = self._templated.response(raw.http_response)
            elif not self._is_chat:
                raw.http_response = with_body(raw.http_response, as_chat(raw.http_response.content))
            body = read_chat(raw.http_response.content)
            turns = [self._drawn(turn) for turn in turns_of_chat(self._sent, body, **self._origin, ended_s=time.time())]
            turns = self._calls.pool.judged(self._key, turns)
        self._span.end(turns)
        self._rollout.count(turns)
        self._calls.check_cut(turns, self._cut_at)
        return Part(body, turns, raw)

    @property
    def asks_rows(self) -> bool:
        """Whether the call asks for rows of its tokens."""
        return ROUTED_START in self._sent

    @property
    def may_be_refused(self) -> bool:
        """Whether the engine refuses the call if its prompt is shorter than expected; a stream has that inside."""
        return bool(self._sent.get(ROUTED_START))

    async def completed(self, part: Part) -> Part:
        """Add rows of the prompt that the reply lacks."""
        if self._sent.get("input_ids"):  # a call that continues from ids follows the rows so far
            return part
        return dataclasses.replace(part, turns=await self._with_prompt_rows(part.turns))

    async def _with_prompt_rows(self, turns: Sequence[Turn]) -> list[Turn]:
        recorded = self._rollout.recorded
        return await with_prompt_rows(self._calls.pool.http, recorded, turns, extra_key=self._extra_key)

    def note_stream(self, stream: OpenStream) -> None:
        """Note that the reply is ``stream``."""
        self._rollout.open_streams[self] = stream
        self._calls.group.begin_stream(self._call)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wrap the reading of a stream. A stream that breaks off with an error is not recorded."""
        try:
            yield
        except (openai.APIError, EngineError) as error:
            self._note_broken(error)
            raise
        except (*UNREADABLE, httpx2.NetworkError, httpx2.ProtocolError) as error:
            self._note_broken(error)
            raise EngineError(f"cannot read the engine's stream to its end: {error!r:.300}") from error

    def _note_broken(self, error: Exception) -> None:
        self._rollout.recorded.is_refusal(self._sent, str(error))  # so that the next call asks for all rows
        logger.info("rollout %s: a stream broke off: %r", self._rollout.rollout_id, error)
        self._close()
        self._end_spans(error=type(error).__name__)

    def feed(self, chunk: ChatCompletionChunk) -> bool:
        """Record one chunk. Returns False if user code did not request it, or gets it from ``last_chunks``.

        Raises ``EngineError`` if ``chunk`` is not a valid chunk.
        """
        if not isinstance(chunk, ChatCompletionChunk):  # the package passes on invalid chunks
            raise unreadable(chunk, CHUNK, TypeError("not a JSON object"))
        fields = chunk.model_dump(exclude_unset=True, warnings=False)
        check_chunk(fields)
        self._reader.feed(fields)
        stripped = strip(fields, self._client_body)
        if stripped is not None and "usage" not in stripped:
            chunk.usage = None  # requested from the engine by us, not by user code
        if stripped is not None and self._may_be_cut(chunk):
            self._withheld.append(chunk)
            return False
        return stripped is not None

    def _may_be_cut(self, chunk: ChatCompletionChunk) -> bool:
        """Whether the token cap may have ended the stream, which is only known at its end."""
        if self._cut_at is None:
            return False
        return bool(self._withheld) or any(choice.finish_reason == "length" for choice in chunk.choices)

    def last_chunks(self) -> list[ChatCompletionChunk]:
        """Return the withheld chunks of a recorded stream. Raises ``RolloutBroken`` if the token cap ended it."""
        if self._calls.is_broken:  # by another call
            self._calls.check()
        self._calls.check_cut(self._turns, self._cut_at)
        return self._withheld

    def check_begun(self) -> None:
        """Raise ``EngineError`` if the stream ended without any choice."""
        check_has_choice(self._reader.is_begun)

    def stop(self) -> bool:
        """Abort the stream at the engine. Returns whether the rest of the stream should be drained."""
        # Other servers end a call when its connection is closed, and send nothing more.
        if self._is_ended or not self._has_gaps:
            return False
        if not self._reader.is_finished:
            self._reader.stop()
            self._calls.abandon(*self._call)
        return not self._reader.is_complete

    def drop(self) -> None:
        """Abort the stream at the engine without recording it."""
        self.stop()
        self._close()
        self._end_spans(error="dropped")

    async def end(self) -> None:
        """Record what was read of the stream."""
        if self._is_ended:
            return
        # Closed before anything is awaited: the reader and the end of the rollout may both call this.
        self._close()
        turns = [self._drawn(turn) for turn in self._reader.turns(ended_s=time.time())]
        if self._has_gaps:
            with self._asking():
                versions = (self._version, await self._calls.pool.weights_at(self._url))
                turns = await complete(self._calls.pool.http, self._url, turns, versions, extra_key=self._extra_key)
                turns = await self._with_prompt_rows(turns)
        self._turns = turns = self._calls.pool.judged(self._key, turns)
        self._end_spans(turns)
        self._rollout.count(turns)
        self._rollout.record(turns, self._options)

    def _asking(self) -> AbstractContextManager[None]:
        """Return a span for engine requests other than the chat."""
        return ended(
            self._calls.trace.begin("engine", up=self._turn.span, engine=without_login(self._url), asked="weights")
        )

    def _end_spans(self, turns: Sequence[Turn] = (), **at: str) -> None:
        self._span.end(turns, **at)
        self._turn.end(turns, **at)

    def _drawn(self, turn: Turn) -> Turn:
        return drawn(turn, sampling_of(self._sent, self._defaults, is_generate=self._templated is not None))

    def _close(self) -> None:
        self._is_ended = True
        self._span.note_answer()
        self._rollout.open_streams.pop(self, None)
        self._calls.group.end_stream(self._call)

    def end_in_thread(self) -> None:
        """Record a stream that is read in a thread, like ``end``."""
        if not self._is_ended:
            self._calls.in_loop(self.end())
