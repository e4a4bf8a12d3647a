"""Decode JSON that an engine sent, with one kind of error for anything malformed."""

from typing import Any, TypeVar

import msgspec

from forebay.core.errors import EngineError

T = TypeVar("T")

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of decoding arbitrary bytes: not JSON, other types, not UTF-8, nested too deeply."""
SHOWN_BYTES = 200

_object = msgspec.json.Decoder(dict[str, Any])


def read_json(content: bytes, decoder: "msgspec.json.Decoder[T]", what: str) -> T:
    """Decode ``content`` with ``decoder``. Raises ``EngineError`` naming ``what`` was expected."""
    try:
        return decoder.decode(content)
    except UNREADABLE as error:
        raise unreadable(content, what, error) from error


def read_object(content: bytes, what: str) -> dict[str, Any]:
    """Decode the JSON object in ``content``. Raises ``EngineError``."""
    return read_json(content, _object, what)


def unreadable(content: object, what: str, error: BaseException) -> EngineError:
    """Return the error for ``content`` that is not a valid ``what``. Its status is 200, which the reply had."""
    shown = content[:SHOWN_BYTES] if isinstance(content, bytes) else content
    text = f"the engine's reply cannot be read as {what} ({error}): {shown!r:.{SHOWN_BYTES + 60}}"
    return EngineError(text, status_code=200)
