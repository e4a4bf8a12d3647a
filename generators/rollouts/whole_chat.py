"""A non-streamed chat of a rollout function, which may take several engine calls."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from forebay.core.addresses import without_login
from forebay.core.errors import EngineError
from forebay.engines.capture.call_spans import ended
from forebay.engines.capture.turn import ABORTED, Turn
from forebay.engines.chat_over_generate import with_body
from forebay.engines.continuation.continued_call import Join, Rest
from forebay.engines.continuation.message import OwnReading, Whole
from forebay.engines.continuation.parts import Json, Part
from forebay.engines.continuation.reply import joined_reply
from forebay.engines.read_json import UNREADABLE
from forebay.generators.rollouts.engine_calls import CHAT_PATH, RAW_HEADER, body_of, headers_of

if TYPE_CHECKING:
    from forebay.generators.rollouts.rollout import Rollout

T = TypeVar("T")


def is_whole_chat(options: Any, *, is_stream: bool) -> bool:
    """Whether a call of the openai package is a non-streamed chat."""
    return options.url.endswith(CHAT_PATH) and not is_stream and headers_of(options).get(RAW_HEADER) != "stream"


class WholeChat:
    """One non-streamed chat, requested with ``options``: its calls, their recording, and the reply.

    All calls return raw responses, because a part that was cut off must not be parsed. Choices that the engine aborts
    are continued one after another.
    """

    def __init__(self, rollout: "Rollout", options: Any) -> None:
        self._rollout = rollout
        self._is_raw = bool(headers_of(options).get(RAW_HEADER))
        self._options = options.model_copy(update={"headers": {**headers_of(options), RAW_HEADER: "true"}})
        self._first = Part({}, [])
        self._rests: dict[int, Rest] = {}

    def options(self, body: Json | None = None) -> Any:
        """Return the options of the first call, or of a later call with ``body``."""
        if body is None:
            return self._options
        return self._options.model_copy(update={"json_data": body, "extra_json": None})

    def rests(self, first: Part) -> list[Rest]:
        """Return the choices to continue after the first call."""
        self._first = first
        body, aborted = body_of(self._options), [turn for turn in first.turns if turn.finish_reason == ABORTED]
        self._rests = {turn.choice: Rest(body, turn) for turn in aborted}
        return list(self._rests.values())

    async def joined(self, join: Join) -> Whole | None:
        """Return the message of a turn in several parts, parsed by the engine of the last part."""
        calls, url = self._rollout.calls, join.turn.engine_url
        template = calls.template_at(url)
        if template is not None:
            return await OwnReading(template.text_of, join.turn, join.body).message()
        with ended(calls.trace.begin("engine", engine=without_login(url), asked="text")):
            return await calls.pool.dialect_at(url).whole_message(calls.pool.http, url, join.turn, join.body)

    @property
    def turns(self) -> list[Turn]:
        """The final state of each choice."""
        return [self._rests[turn.choice].turn if turn.choice in self._rests else turn for turn in self._first.turns]

    def record(self) -> None:
        """Record all turns, including the parts of a turn that could not be continued."""
        for turn in self._first.turns:
            rest = self._rests.get(turn.choice)
            if rest is None:
                self._rollout.record([turn], self._options)
            else:
                self._rollout.record(rest.turns, self._options, num_merged=max(0, len(rest.parts.texts) - 1))
        self._note_segments()

    def reply(self) -> Any:
        """Return one reply for the rollout function, as if from one call."""
        raw = self._first.raw
        if self._rests:
            raw.http_response = self._joined(raw.http_response)
        return raw if self._is_raw else readable(raw.parse)

    def _joined(self, response: Any) -> Any:
        """Return the HTTP response of the first call with the joined content of all calls."""
        logprobs = {choice: rest.parts.logprobs for choice, rest in self._rests.items()}
        content = msgspec.json.encode(joined_reply(self._first.reply, self.turns, logprobs))
        return with_body(response, content)

    def _note_segments(self) -> None:
        """Record where the text of a message was cut: its parts may come from different weights."""
        rest = self._rests.get(0)
        if rest is None or len(rest.parts.texts) < 2:
            return
        segments = {
            "message_index": len(rest.parts.before),
            "texts": rest.parts.texts,
            "completion_tokens": rest.parts.completion_tokens,
            "weight_versions": rest.parts.weight_versions,
        }
        self._rollout.extra_info.setdefault("segments", []).append(segments)


def readable(read: Callable[[], T]) -> T:
    """Return the result of ``read``, a parser of the openai package. Raises ``EngineError`` if it fails."""
    try:
        return read()
    except UNREADABLE as error:
        raise EngineError(f"cannot read the engine's reply: {error!r:.300}", status_code=200) from error
