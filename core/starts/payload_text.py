"""Detects texts that file names, databases and UTF-8 cannot hold: with a NUL byte, or half a surrogate pair."""

from collections.abc import Mapping
from typing import Any

from forebay.core.errors import InvalidInput

LONGEST_NAME = 100
"""Maximum characters of a name repeated in an error."""


def is_plain(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8 and contains no NUL."""
    return "\0" not in text and is_utf8(text)


def is_utf8(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which sampled text may contain."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_texts(payload: Mapping[str, Any]) -> None:
    """Raise ``InvalidInput`` for the first field whose text or name is not plain, at any depth."""
    for field, value in payload.items():
        if not is_plain(field):
            raise _refusal("body", "the name of a field")
        # A stack instead of recursion, because values may be nested as deeply as Python's reader allows.
        left = [value]
        while left:
            each = left.pop()
            if isinstance(each, str):
                if not is_plain(each):
                    raise _refusal(field[:LONGEST_NAME], field[:LONGEST_NAME])
            elif isinstance(each, dict):
                left += each
                left += each.values()
            elif isinstance(each, list):
                left += each


def _refusal(field: str, what: str) -> InvalidInput:
    return InvalidInput(
        f"{what} contains a NUL byte or half a surrogate pair, which files, databases and UTF-8 do not accept",
        hint="send it without \\u0000, and with \\ud800 to \\udfff only as pairs",
        field=field,
    )
