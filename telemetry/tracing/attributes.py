"""Limits the attributes of a span that are written: short texts, JSON numbers, and a bounded count."""

import math
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 200
"""Maximum characters of a text."""
MAX_ATTRIBUTES = 32
MAX_ITEMS = 64
"""Maximum items of a list or dict."""
_MAX_INTEGER = 1 << 63


def short_attributes(at: dict[str, Any]) -> dict[str, Any]:
    """The written form of attributes: texts are cut, numbers outside JSON are dropped, other values become text."""
    try:
        if _is_short(at):
            return at
    except RuntimeError:  # another thread is adding attributes
        pass
    return _shortened(at.copy())


def _is_short(at: dict[str, Any]) -> bool:
    """Whether all attributes can be written unchanged, which is true of nearly all spans."""
    for value in at.values():
        kind = type(value)
        if kind is str:
            if len(value) > MAX_TEXT:
                return False
        elif kind is int:
            if not -_MAX_INTEGER <= value < _MAX_INTEGER:
                return False
        elif kind is not bool and (kind is not float or not math.isfinite(value)):
            return False
    return len(at) <= MAX_ATTRIBUTES


def _shortened(at: dict[str, Any]) -> dict[str, Any]:
    try:
        kept = {name[:MAX_TEXT]: _short(value) for name, value in list(at.items())[:MAX_ATTRIBUTES]}
    except Exception:  # noqa: BLE001 - if a user's object cannot be shown, only its span's attributes are lost
        return {}
    return {name: value for name, value in kept.items() if value is not None}


def _short(value: Any, depth: int = 2) -> Any:
    """The written form of one value; None to drop it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value[:MAX_TEXT])
    if isinstance(value, int) and -_MAX_INTEGER <= value < _MAX_INTEGER:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping) and depth:
        items = list(value.items())[:MAX_ITEMS]
        return {str(key)[:MAX_TEXT]: _short(each, depth - 1) for key, each in items}
    if isinstance(value, list | tuple) and depth:
        return [_short(each, depth - 1) for each in value[:MAX_ITEMS]]
    return str(value)[:MAX_TEXT]
