"""What is asked of an engine beside what the agent asked for, what is kept of its answer, and what the agent gets."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from forebay.engines.cache_keys import CacheKey
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.read_stream import StreamReader
from forebay.engines.capture.request_fields import asking, strip
from forebay.engines.capture.sampling_params import EngineDefaults, drawn, sampling_of
from forebay.engines.capture.turn import ABORTED, Turn
from forebay.engines.continuation.reply import Logprobs, joined_usage
from forebay.gateway.off_loop import MANY_MESSAGES
from forebay.gateway.refusals import EngineLost

Json = dict[str, Any]


class CallRecording:
    """One chat: ``client_body`` is what the agent sent, ``body`` the same within the session's bounds."""

    def __init__(self, client_body: Json, body: Json) -> None:
        self.client_body = client_body
        self.body = body

    @property
    def is_stream(self) -> bool:
        """Whether the answer is wanted as it comes."""
        return self.body.get("stream") is True

    @property
    def is_large(self) -> bool:
        """Whether what is made of its messages is better made in a thread."""
        messages = self.body.get("messages")
        return isinstance(messages, list) and len(messages) > MANY_MESSAGES

    def engine_body(self, rid: str, key: CacheKey, *, is_sglang: bool) -> Json:
        """The body for the engine, which is to cache it under ``key``."""
        if not is_sglang:
            # Other engines may refuse fields that they do not know: they are asked for nothing more.
            return self.body
        try:
            body = asking(self.body, is_stream=self.is_stream)
        except (TypeError, ValueError, AttributeError):  # fields of wrong types: the engine is to refuse them
            body = self.body
        # Without the key a prompt's cache may be that of other weights, where an update did not empty it.
        return {**body, "rid": rid, "extra_key": key.beside(body.get("extra_key"))}

    def turns(self, reply: Json, rid: str, engine_url: str, began_s: float, defaults: EngineDefaults) -> list[Turn]:
        """The turns of a whole reply. ``defaults`` are the engine's for what the body leaves out."""
        turns = turns_of_chat(self.body, reply, rid=rid, engine_url=engine_url, began_s=began_s, ended_s=time.time())
        return [drawn(turn, sampling_of(self.body, defaults)) for turn in turns]

    def stripped(self, reply: Json) -> Json | None:
        """The reply, or a chunk, without what the agent did not ask for; None for a chunk of which nothing is left."""
        left = strip(reply, self.client_body)
        if left is not None and self.client_body.get("rid") and "id" in left:
            left["id"] = self.client_body["rid"]  # SGLang names an answer by the request's ``rid``
        return left


class StreamRecording:
    """The chunks of one answer. Those of its end wait until it is known whether the answer has to be gone on with."""

    def __init__(
        self, recording: CallRecording, rid: str, engine_url: str, began_s: float, defaults: EngineDefaults
    ) -> None:
        self._recording = recording
        self._sampling = sampling_of(recording.body, defaults)
        self._reader = StreamReader(recording.body, rid=rid, engine_url=engine_url, began_s=began_s)
        self._last_chunks: list[Json] = []
        self._is_ending = False

    def feed(self, chunk: Json) -> Json | None:
        """The chunk as the agent gets it now; None if it gets nothing of it, or gets it at the end."""
        self._reader.feed(chunk)
        # From the first finish reason on, whichever choice has it. What comes after it takes no time.
        self._is_ending = self._is_ending or any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
        left = self._recording.stripped(chunk)
        if left is None or not self._is_ending:
            return left
        self._last_chunks.append(left)
        return None

    @property
    def is_begun(self) -> bool:
        """Whether there was a choice in any chunk."""
        return self._reader.is_begun

    def stop(self) -> None:
        """The agent is gone: what the engine samples from here on does not count."""
        self._reader.stop()

    def turns(self) -> list[Turn]:
        """The turns of the stream so far."""
        return [drawn(turn, self._sampling) for turn in self._reader.turns(ended_s=time.time())]

    def end(self, seen: Sequence[Turn], turns: Sequence[Turn], logprobs: Logprobs) -> Iterator[Json]:
        """The last chunks. ``seen`` are the turns that have gone out, ``turns`` those that were to.

        Raises ``EngineLost`` if what has gone out is no beginning of what was to.
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
    """The delta between a message of which ``seen`` has gone out and the ``whole`` one.

    Raises ``EngineLost`` if what has gone out is no beginning of it.
    """
    delta: Json = {}
    for name in ("reasoning_content", "content"):
        before, now = seen.get(name) or "", whole.get(name) or ""
        if not now.startswith(before):
            raise EngineLost("the answer was aborted, and its rest does not fit what has gone out")
        if now != before:
            delta[name] = now[len(before) :]
    if calls := _rest_of_calls(seen.get("tool_calls") or [], whole.get("tool_calls") or []):
        delta["tool_calls"] = calls
    return delta


def _rest_of_calls(seen: Sequence[Json], whole: Sequence[Json]) -> list[Json]:
    if len(seen) > len(whole):
        raise EngineLost("the answer was aborted in a tool call that its rest does not complete")
    rest = [{"index": index, **call} for index, call in enumerate(whole)][len(seen) :]
    begun = []
    for index, (before, now) in enumerate(zip(seen, whole, strict=False)):
        given, full = before["function"].get("arguments") or "", now["function"].get("arguments") or ""
        if not full.startswith(given):
            raise EngineLost("the answer was aborted in a tool call that its rest does not fit")
        # Read from all tokens again, a call got another id: the agent answers to the one that has gone out.
        now["id"] = before.get("id") or now.get("id")
        if full != given:
            begun.append({"index": index, "function": {"arguments": full[len(given) :]}})
    return [*begun, *rest]
