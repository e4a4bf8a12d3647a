"""Texts that no file name, database or reader of UTF-8 takes: those with a NUL byte, or with half a surrogate pair."""

from collections.abc import Mapping
from typing import Any

from forebay.core.errors import InvalidInput

LONGEST_NAME = 100
"""Characters of a name that an error repeats."""


def is_plain(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8, and holds no NUL."""
    return "\0" not in text and is_utf8(text)


def is_utf8(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which sampled text may."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_texts(payload: Mapping[str, Any]) -> None:
    """Raise ``InvalidInput`` that names the first field with a text, or a name, that is not plain, at any depth."""
    for field, value in payload.items():
        if not is_plain(field):
            raise _refusal("body", "the name of a field")
        # A stack, and no recursion: what was read may be nested as deeply as Python's reader allows.
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
        f"{what} holds a NUL byte or half a surrogate pair, which no file, database or UTF-8 text takes",
        hint="send it without \\u0000, and \\ud800 to \\udfff only as pairs",
        field=field,
    )
