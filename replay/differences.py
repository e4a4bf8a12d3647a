"""Describes where two JSON values first differ: a request and its recording, or two recordings."""

from typing import Any, NamedTuple

import msgspec

LEAD = 30
"""Characters shown before the first difference."""
WIDEST = 100

_encode = msgspec.json.Encoder(order="sorted").encode


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()
"""Stands for a missing value."""


class Difference(NamedTuple):
    """``path`` is as in ``messages[1].content``; it is empty if the values differ as a whole."""

    path: str
    one: Any
    other: Any

    def in_words(self, one: str, other: str) -> str:
        """One line. ``one`` and ``other`` name the origins of the values: "recorded", "now"."""
        where = self.path or "the value"
        if isinstance(self.one, str) and isinstance(self.other, str):
            common = _num_common(self.one, self.other)
            begin = max(0, common - LEAD)
            place = f" from character {common + 1} on" if begin else ""
            shown = [("…" if begin else "") + text[begin:] for text in (self.one, self.other)]
            return f"{where} differs{place}: {one} {_shown(shown[0])}, {other} {_shown(shown[1])}"
        return f"{where}: {one} {_shown(self.one)}, {other} {_shown(self.other)}"


def first_difference(one: Any, other: Any) -> Difference | None:
    """The first and deepest place at which two JSON values differ; None if they are equal.

    The order of an object's fields does not matter. ``1``, ``1.0`` and ``true`` are three different values.
    """
    path = ""
    while not _is_same(one, other):
        if isinstance(one, dict) and isinstance(other, dict):
            names = (*one, *(name for name in other if name not in one))
            pairs = ((f".{name}", one.get(name, ABSENT), other.get(name, ABSENT)) for name in names)
        elif isinstance(one, list) and isinstance(other, list):
            size = max(len(one), len(other))
            pairs = ((f"[{at}]", _entry(one, at), _entry(other, at)) for at in range(size))
        else:
            return Difference(path.removeprefix("."), one, other)
        step, one, other = next(pair for pair in pairs if not _is_same(pair[1], pair[2]))
        path += step
    return None


def _num_common(one: str, other: str) -> int:
    """The number of characters that both start with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _entry(values: list[Any], at: int) -> Any:
    return values[at] if at < len(values) else ABSENT


def _is_same(one: Any, other: Any) -> bool:
    # Encoded, because to Python 1 == True == 1.0.
    return one is other or (one is not ABSENT and other is not ABSENT and _encode(one) == _encode(other))


def _shown(value: Any) -> str:
    text = repr(value) if value is ABSENT else _encode(value).decode()
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
