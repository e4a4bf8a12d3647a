"""Put the reasoning of recorded answers back into the histories of agents that drop it.

Otherwise the next prompt diverges from the recorded tokens, and each turn becomes a sample of its own. Only the message
is completed: the engine's chat template decides which reasoning becomes part of the prompt.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forebay.engines.capture.turn import Turn
from forebay.gateway.dialects.history import arguments_object
from forebay.gateway.runs.conversations import digests, visible_text

REASONING = "reasoning_content"
"""The field that SGLang reads. vLLM reads it too, but calls it ``reasoning`` itself."""
NAMES = (REASONING, "reasoning")

_encode = msgspec.json.Encoder(order="deterministic").encode


class ReasoningMemo:
    """The reasoning of a rollout's answers, and the messages that it was put back into. ``counters``:

    - ``restored``: answers that came back without their reasoning and got it again;
    - ``unrestored``: messages of the assistant without reasoning that match no answer of the rollout.

    A message that comes with every call counts once.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._by_place: dict[int, str] = {}
        """The reasoning of the message that ends a conversation, by the conversation's digest; "" for none.

        Never replaced, so that the beginning of a history stays the same, whatever the model answers later.
        """
        self._by_message: dict[bytes, str] = {}
        """The reasoning of the earliest equal answer, for conversations that differ from the recorded ones."""
        self._counted: set[int] = set()

    def remember(self, turns: Sequence[Turn]) -> None:
        """Store the answers to one call."""
        for turn in turns:
            *_, place = digests([*turn.messages, turn.reply])
            thought = str(turn.reply.get(REASONING) or "")
            self._by_place.setdefault(place, thought)
            if (key := _key(turn.reply)) is not None:
                self._by_message.setdefault(key, thought)

    def restored(self, messages: object) -> object:
        """Return the messages of a chat with their reasoning."""
        if not isinstance(messages, list):
            return messages
        return [self._restored(*pair) for pair in zip(messages, digests(messages), strict=True)]

    def _restored(self, message: Any, place: int) -> Any:
        if not isinstance(message, dict) or message.get("role") != "assistant" or any(map(message.get, NAMES)):
            return message
        thought = self._by_place.get(place)
        if thought is None:
            thought = self._by_message.get(_key(message) or b"")
            self._by_place[place] = thought or ""
        if thought != "" and place not in self._counted:
            self._counted.add(place)
            self._counters["restored" if thought else "unrestored"] += 1
        return {**message, REASONING: thought} if thought else message


def _key(message: Mapping[str, Any]) -> bytes | None:
    """Return the identity of an answer: its text and its calls with their ids. None if it has neither."""
    text, calls = visible_text(message.get("content")), message.get("tool_calls")
    listed = [_call(call) for call in calls] if isinstance(calls, list) else []
    return _encode([text, listed]) if text or listed else None


def _call(call: Any) -> object:
    """Return a call with its arguments parsed, because clients write them with other blanks."""
    match call:
        case {"id": name, "function": {"name": function, "arguments": str(arguments)}}:
            parsed = arguments_object(arguments)
            return [name, function, arguments if parsed is None else parsed]
    return call
