"""Keeping each message of a long rollout once, however many turns send it again."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forebay.engines.capture.turn import Turn

Object = dict[str, Any]


class Messages:
    """Hands out one shared copy of every message and tool. The copies must not be changed."""

    def __init__(self) -> None:
        self._held: dict[bytes, Object] = {}

    def shared(self, turn: Turn) -> Turn:
        """``turn`` with copies of its own, so that it stays as it was sent."""
        messages, tools = self._copies(turn.messages), self._copies(turn.tools)
        return msgspec.structs.replace(turn, messages=messages, tools=tools, reply=_copy(turn.reply))

    def _copies(self, objects: Sequence[Mapping[str, Any]]) -> list[Object]:
        encoded = (msgspec.json.encode(each, enc_hook=_plain) for each in objects)
        return [self._held.setdefault(key, msgspec.json.decode(key)) for key in encoded]


def _copy(message: Mapping[str, Any]) -> Object:
    return msgspec.json.decode(msgspec.json.encode(message, enc_hook=_plain), type=Object)


def _plain(value: Any) -> object:
    """Messages of the openai package, as users put them into the next request."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(exclude_none=True, warnings=False)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
