"""Reading JSON that an engine sent: whatever else it may have sent is one kind of error."""

from typing import Any, TypeVar

import msgspec

from forebay.core.errors import EngineError

T = TypeVar("T")

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises for bytes that an engine made up: no JSON, other types, no UTF-8, nested too deep."""
SHOWN_BYTES = 200

_object = msgspec.json.Decoder(dict[str, Any])


def read_json(content: bytes, decoder: "msgspec.json.Decoder[T]", what: str) -> T:
    """``content`` as ``decoder`` reads it. Raises ``EngineError``, which says that it is no ``what``."""
    try:
        return decoder.decode(content)
    except UNREADABLE as error:
        raise unreadable(content, what, error) from error


def read_object(content: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``content``. Raises ``EngineError``."""
    return read_json(content, _object, what)


def unreadable(content: object, what: str, error: BaseException) -> EngineError:
    """The error for ``content`` that is no ``what``: for a 200, since an error status needs no body."""
    shown = content[:SHOWN_BYTES] if isinstance(content, bytes) else content
    return EngineError(f"the engine answered no {what} ({error}): {shown!r:.{SHOWN_BYTES + 60}}", status_code=200)
