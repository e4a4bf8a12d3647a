"""A span that is open: closed by ``end``, or by leaving its ``with``, within which it is the current one."""

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from forebay.telemetry.tracing.trace_ids import format_traceparent

MAX_TEXT = 200
"""Characters of an attribute."""
MAX_ATTRIBUTES = 32
MAX_ITEMS = 64
"""Of an attribute that is a list or a dict."""
_MAX_INTEGER = 1 << 63


class SpanScope(Protocol):
    """To what a span belongs: an attempt of a rollout, or the run."""

    is_kept: bool

    @property
    def trace_id(self) -> str:
        """32 hex digits."""

    def begin_inside(self, above: "SpanHandle", name: str, at: dict[str, Any]) -> "SpanHandle":
        """Open one within ``above``."""

    def ended(self, handle: "SpanHandle", at_ns: int | None) -> None:
        """Note that it ended, now or at ``at_ns``."""

    def note_open(self, handle: "SpanHandle") -> None:
        """Write that it is still open."""


class SpanHandle(msgspec.Struct, eq=False):
    """An open span. None of its methods raises; it may be ended from any thread, and only the first end counts."""

    scope: SpanScope
    name: str
    id: str
    up: str
    turn: int | None
    begun: int
    at: dict[str, Any]
    is_open: bool = True
    is_noted: bool = False
    on_open: "Callable[[SpanHandle], Mapping[str, Any] | None] | None" = None
    """Called by the recorder's thread once this has lasted ten seconds: what it returns is noted with it.

    It must not block. If it returns None, whoever gave it calls ``note_open`` soon; else it is noted without.
    """
    token: "Token[SpanHandle | None] | None" = None
    """Of the ``with``."""

    @property
    def traceparent(self) -> str:
        """The header by which others' spans become children of this one."""
        return format_traceparent(self.scope.trace_id, self.id, is_sampled=self.scope.is_kept)

    def set(self, **at: Any) -> None:
        """Add attributes."""
        self.at.update(at)

    def end(self, at_ns: int | None = None, **at: Any) -> None:
        """Close it, now or at ``at_ns``."""
        if self.is_open:
            self.is_open = False
            if at:
                self.at.update(at)
            self.scope.ended(self, at_ns)

    def note_open(self, **at: Any) -> None:
        """Write that it is open, with more attributes: the late answer of ``on_open``."""
        self.at.update(at)
        if self.is_open and not self.is_noted:
            self.is_noted = True
            self.scope.note_open(self)

    def __enter__(self) -> Self:
        self.token = current_span.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        token = self.token
        if token is not None:
            try:  # noqa: SIM105 - a ``suppress`` costs as much as the rest of this
                current_span.reset(token)
            except ValueError:  # a generator that was closed elsewhere: the context of its ``with`` is gone
                pass
        if kind is not None:
            self.at.setdefault("error", kind.__name__)
        if self.is_open:
            self.is_open = False
            self.scope.ended(self, None)


current_span: ContextVar[SpanHandle | None] = ContextVar("forebay_span", default=None)


def short_attributes(at: dict[str, Any]) -> dict[str, Any]:
    """What is written of attributes: texts are cut, numbers that are none left out, all else is its text."""
    try:
        if _is_short(at):
            return at
    except RuntimeError:  # another thread sets some
        pass
    return _shortened(at.copy())


def _is_short(at: dict[str, Any]) -> bool:
    """Whether all of it can be written as it is: true of nearly all spans."""
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
    except Exception:  # noqa: BLE001 - a user's object that cannot be shown costs its span's attributes, nothing more
        return {}
    return {name: value for name, value in kept.items() if value is not None}


def _short(value: Any, depth: int = 2) -> Any:
    """What is written of one value; None for what is left out."""
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
