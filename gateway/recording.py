"""Record one chat: extend its request, keep turns of the reply, and restore the reply for the agent."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from forebay.engines.cache_keys import CacheKey
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.read_stream import StreamReader
from forebay.engines.capture.request_fields import ROUTED_ASKED, strip
from forebay.engines.capture.sampling_params import drawn, sampling_of
from forebay.engines.capture.turn import ABORTED, Turn
from forebay.engines.continuation.reply import Logprobs, joined_usage
from forebay.engines.dialect import EngineDialect
from forebay.gateway.engine_request import EngineRequest
from forebay.gateway.off_loop import MANY_MESSAGES
from forebay.gateway.refusals import EngineLost

Json = dict[str, Any]


class CallRecording:
    """One chat: ``client_body`` is the agent's request, ``body`` the request within the session's limits."""

    def __init__(self, client_body: Json, body: Json) -> None:
        self.client_body = client_body
        self.body = body
        self.sent = body
        """The body that the engine got."""

    @property
    def is_stream(self) -> bool:
        """Whether the agent requested a stream."""
        return self.body.get("stream") is True

    @property
    def is_large(self) -> bool:
        """Whether a thread should process the chat, because of its many messages or of the rows that it asks for."""
        messages = self.body.get("messages")
        return ROUTED_ASKED in self.sent or (isinstance(messages, list) and len(messages) > MANY_MESSAGES)

    def engine_body(self, rid: str, key: CacheKey, dialect: EngineDialect, rows: Json) -> Json:
        """Return the body for the engine, which caches it under ``key``; ``rows`` are the fields that ask for rows."""
        try:
            body = dialect.ask({**self.body, **rows}, is_stream=self.is_stream)
        except (TypeError, ValueError, AttributeError):  # fields of wrong types: the engine rejects them
            body = self.body
        # Without the key, a prompt could use cache entries of other weights, if an update did not clear them.
        self.sent = dialect.keyed(dialect.named(body, rid), key)
        return self.sent

    def turns(self, reply: Json, request: EngineRequest) -> list[Turn]:
        """Return the turns of a whole reply."""
        turns = turns_of_chat(self.sent, reply, **request.origin, ended_s=time.time())
        return [drawn(turn, sampling_of(self.body, request.defaults)) for turn in turns]

    def stripped(self, reply: Json) -> Json | None:
        """Remove from a reply or chunk what the agent did not request; None if nothing of a chunk is left."""
        left = strip(reply, self.client_body)
        if left is not None and self.client_body.get("rid") and "id" in left:
            left["id"] = self.client_body["rid"]  # SGLang uses the request's ``rid`` as the answer's id
        return left


class StreamRecording:
    """The chunks of one answer. Its last chunks are held until it is known whether the answer must be continued."""

    def __init__(self, recording: CallRecording, request: EngineRequest) -> None:
        self._recording = recording
        self._sampling = sampling_of(recording.body, request.defaults)
        self._reader = StreamReader(recording.sent, **request.origin)
        self._last_chunks: list[Json] = []
        self._is_ending = False

    def feed(self, chunk: Json) -> Json | None:
        """Return the chunk for the agent; None if nothing of it is for the agent, or it is held until the end."""
        self._reader.feed(chunk)
        # Starts with the first finish reason of any choice; the chunks after it arrive at once.
        self._is_ending = self._is_ending or any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
        left = self._recording.stripped(chunk)
        if left is None or not self._is_ending:
            return left
        self._last_chunks.append(left)
        return None

    @property
    def is_begun(self) -> bool:
        """Whether any chunk contained a choice."""
        return self._reader.is_begun

    def stop(self) -> None:
        """Stop counting sampled tokens, because the agent is gone."""
        self._reader.stop()

    def turns(self) -> list[Turn]:
        """Return the turns of the stream so far."""
        return [drawn(turn, self._sampling) for turn in self._reader.turns(ended_s=time.time())]

    def end(self, seen: Sequence[Turn], turns: Sequence[Turn], logprobs: Logprobs) -> Iterator[Json]:
        """Yield the last chunks. ``seen`` are the turns sent so far, ``turns`` the complete ones.

        Raises ``EngineLost`` if the sent turns are not a prefix of the complete ones.
        """
        before, after = ({turn.choice: turn for turn in each} for each in (seen, turns))
        for chunk in self._last_chunks:
            for choice in chunk.get("choices") or ():
                index = choice.get("index") or 0
                if choice.get("finish_reason") == ABORTED and index in logprobs:
                    if delta := rest_of(before[index].reply, after[index].reply):
                        yield {**chunk, "choices": [self._rest(choice, delta, logprobs[index])]}
                    choice["finish_reason"] = after[index].finish_reason
            usage = {"usage": joined_usage(chunk["usage"], turns)} if logprobs and chunk.get("usage") else {}
            yield {**chunk, **usage}

    def _rest(self, choice: Json, delta: Json, tokens: list[Json]) -> Json:
        logprobs = {"content": tokens} if self._recording.client_body.get("logprobs") else None
        return {**choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def rest_of(seen: Json, whole: Json) -> Json:
    """Return the delta from the sent part ``seen`` of a message to the ``whole`` message.

    Raises ``EngineLost`` if ``seen`` is not a prefix of it.
    """
    delta: Json = {}
    for name in ("reasoning_content", "content"):
        before, now = seen.get(name) or "", whole.get(name) or ""
        if not now.startswith(before):
            raise EngineLost("the answer was aborted, and its continuation does not match the part already sent")
        if now != before:
            delta[name] = now[len(before) :]
    if calls := _rest_of_calls(seen.get("tool_calls") or [], whole.get("tool_calls") or []):
        delta["tool_calls"] = calls
    return delta


def _rest_of_calls(seen: Sequence[Json], whole: Sequence[Json]) -> list[Json]:
    if len(seen) > len(whole):
        raise EngineLost("the answer was aborted in a tool call that its continuation does not complete")
    rest = [{"index": index, **call} for index, call in enumerate(whole)][len(seen) :]
    begun = []
    for index, (before, now) in enumerate(zip(seen, whole, strict=False)):
        given, full = before["function"].get("arguments") or "", now["function"].get("arguments") or ""
        if not full.startswith(given):
            raise EngineLost("the answer was aborted in a tool call that its continuation does not match")
        # Parsing all tokens again gave the call a new id; the agent refers to the id already sent.
        now["id"] = before.get("id") or now.get("id")
        if full != given:
            begun.append({"index": index, "function": {"arguments": full[len(given) :]}})
    return [*begun, *rest]
