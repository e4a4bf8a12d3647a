"""Open spans and their scope: an attempt of a rollout, or the run.

A ``Scope`` creates spans, keeps track of open ones, and writes them to its recorder when they end.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from forebay.telemetry.tracing.exclusive_time import PlainInterval
from forebay.telemetry.tracing.records import Open, Record, Span
from forebay.telemetry.tracing.trace_ids import format_traceparent, new_span_id, trace_id

logger = logging.getLogger(__name__)

LONG_NS = 10_000_000_000
"""After this time, a span is recorded while it is still open."""
LATE_NS = 2_000_000_000
"""How much longer that record waits for an ``on_open`` that could not answer at once."""
_MAX_TEXT = 200
"""Maximum characters of a text."""
_MAX_ATTRIBUTES = 32
_MAX_ITEMS = 64
"""Maximum items of a list or dict."""
_MAX_INTEGER = 1 << 63


class SpanHandle(msgspec.Struct, eq=False):
    """An open span. Its methods never raise. It may be ended from any thread, and only the first end counts."""

    scope: "Scope"
    name: str
    id: str
    up: str
    turn: int | None
    begun: int
    at: dict[str, Any]
    is_open: bool = True
    is_noted: bool = False
    on_open: "Callable[[SpanHandle], Mapping[str, Any] | None] | None" = None
    """Called by the recorder's thread once the span has lasted ten seconds; the result is recorded with it.

    It must not block. If it returns None, ``note_open`` must be called soon, or the span is recorded without more.
    """
    noted_after_ns: int = LONG_NS
    token: "Token[SpanHandle | None] | None" = None
    """The token of the ``with``."""

    @property
    def traceparent(self) -> str:
        """The header with which spans of other services become children of this one."""
        return format_traceparent(self.scope.trace_id, self.id, is_sampled=self.scope.is_kept)

    def set(self, **at: Any) -> None:
        """Add attributes."""
        self.at.update(at)

    def end(self, at_ns: int | None = None, **at: Any) -> None:
        """End it, now or at ``at_ns``."""
        if self.is_open:
            self.is_open = False
            if at:
                self.at.update(at)
            self.scope.ended(self, at_ns)

    def note_open(self, **at: Any) -> None:
        """Record that it is still open, with more attributes: the late answer of ``on_open``."""
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
            try:  # noqa: SIM105 - ``suppress`` would double the cost of this method
                current_span.reset(token)
            except ValueError:  # a generator that was closed elsewhere: the context of its ``with`` is gone
                pass
        if kind is not None:
            self.at.setdefault("error", kind.__name__)
        if self.is_open:
            self.is_open = False
            self.scope.ended(self, None)


current_span: ContextVar[SpanHandle | None] = ContextVar("forebay_span", default=None)


class Recorder(Protocol):
    """Accepts records."""

    run_id: str

    def now(self) -> int:
        """Nanoseconds since the Unix epoch."""

    def write(self, record: Record) -> None:
        """Accept a record."""

    def watch(self, scope: "Scope") -> None:
        """Call ``note_long`` of ``scope`` regularly."""


class Scope:
    """Spans of one attempt of a rollout or, without a ``uid``, of the run. Safe for any thread."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        uid: str = "",
        group: str = "",
        attempt: int = 0,
        up: str = "",
        is_kept: bool = True,
    ) -> None:
        self.uid = uid
        self.group = group
        self.attempt = attempt
        self.is_kept = is_kept
        self._recorder = recorder
        self._now, self._write = recorder.now, recorder.write
        self._up = up
        self._open: dict[str, SpanHandle] = {}
        self._last_turn: int | None = None
        self._intervals: list[PlainInterval] | None = None
        """The ended spans of an attempt, whether or not they are kept."""
        self._calls: dict[int | None, list[dict[str, Any]]] = {}
        """Attributes of engine calls, by turn."""
        recorder.watch(self)

    @property
    def trace_id(self) -> str:
        """The trace of the rollout, or of the run."""
        return trace_id(self._recorder.run_id, self.uid)

    def now(self) -> int:
        """Nanoseconds since the Unix epoch, on the monotonic clock."""
        return self._now()

    def begin(
        self,
        name: str,
        /,
        *,
        turn: int | None = None,
        begun: int | None = None,
        up: SpanHandle | str | None = None,
        **at: Any,
    ) -> SpanHandle:
        """Open a span, which ``end`` or a ``with`` closes; within the ``with`` it is the current span.

        ``up``: the enclosing span, if it is not the current one.
        """
        above, turn = self._place(up, turn)
        return self._opened(name, new_span_id(), above, turn, begun, at)

    def begin_inside(self, above: SpanHandle, name: str, at: dict[str, Any]) -> SpanHandle:
        """Open a span as ``begin`` does in the context of ``above``, which must be of this scope."""
        # Inlined, as in ``ended``: these two are most of the cost of a span.
        span_id = new_span_id()
        turn = above.turn if above.turn is not None else self._last_turn
        handle = self._open[span_id] = SpanHandle(self, name, span_id, above.id, turn, self._now(), at)
        return handle

    def add(
        self,
        name: str,
        t: int,
        d: int,
        /,
        *,
        turn: int | None = None,
        up: SpanHandle | str | None = None,
        **at: Any,
    ) -> None:
        """Add a span measured elsewhere: from ``t``, for ``d``, both in nanoseconds."""
        above, turn = self._place(up, turn)
        self._opened(name, new_span_id(), above, turn, t, at).end(t + d)

    def ended(self, handle: SpanHandle, at_ns: int | None) -> None:
        """Record that ``handle`` ended, now or at ``at_ns``."""
        # A span that was open at a fork is written by the parent.
        if self._open.pop(handle.id, None) is None:
            return
        name, begun, at = handle.name, handle.begun, handle.at
        lasted = max((at_ns or self._now()) - begun, 0)
        if self._intervals is not None:
            self._intervals.append((name, begun, begun + lasted, handle.id, handle.up))
            if name == "engine":
                self._calls.setdefault(handle.turn, []).append(at)
        if self.is_kept:
            self._write(
                Span(
                    name=name,
                    t=begun,
                    d=lasted,
                    id=handle.id,
                    up=handle.up,
                    uid=self.uid,
                    group=self.group,
                    attempt=self.attempt,
                    turn=handle.turn,
                    at=_written(at) if at else at,
                )
            )

    def note_open(self, handle: SpanHandle) -> None:
        """Record that ``handle`` is still open."""
        if self.is_kept and handle.id in self._open:
            self._write(
                Open(
                    name=handle.name,
                    t=handle.begun,
                    id=handle.id,
                    up=handle.up,
                    uid=self.uid,
                    group=self.group,
                    attempt=self.attempt,
                    turn=handle.turn,
                    at=_written(handle.at).copy(),
                )
            )

    def note_long(self, now: int) -> None:
        """Record each span that has been open for long, once."""
        for handle in list(self._open.values()):
            if not handle.is_noted and now - handle.begun >= handle.noted_after_ns:
                more = _more_of(handle)
                if more is None:
                    handle.noted_after_ns += LATE_NS
                else:
                    handle.note_open(**more)

    def forget_open(self) -> None:
        """Forget open spans after a fork: they belong to the parent."""
        self._open.clear()

    def _place(self, up: SpanHandle | str | None, turn: int | None) -> tuple[str, int | None]:
        """The id of a new span's enclosing span, and its turn: by default the last one that began."""
        above = current_span.get() if up is None else up
        place, last = above if isinstance(above, str) else self._up, self._last_turn
        if isinstance(above, SpanHandle) and above.scope is self:
            place, last = above.id, last if above.turn is None else above.turn
        return place, last if turn is None else turn

    def _opened(
        self, name: str, span_id: str, up: str, turn: int | None, begun: int | None, at: dict[str, Any]
    ) -> SpanHandle:
        handle = self._open[span_id] = SpanHandle(self, name, span_id, up, turn, begun or self._now(), at)
        return handle


def _more_of(handle: SpanHandle) -> Mapping[str, Any] | None:
    """What ``on_open`` adds to the record. It is called once."""
    on_open, handle.on_open = handle.on_open, None
    try:
        return on_open(handle) if on_open is not None else {}
    except Exception:  # the record is written even if this fails
        logger.debug("on_open of the span %s failed", handle.name, exc_info=True)
        return {}


def _written(at: dict[str, Any]) -> dict[str, Any]:
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
            if len(value) > _MAX_TEXT:
                return False
        elif kind is int:
            if not -_MAX_INTEGER <= value < _MAX_INTEGER:
                return False
        elif kind is not bool and (kind is not float or not math.isfinite(value)):
            return False
    return len(at) <= _MAX_ATTRIBUTES


def _shortened(at: dict[str, Any]) -> dict[str, Any]:
    try:
        kept = {name[:_MAX_TEXT]: _short(value) for name, value in list(at.items())[:_MAX_ATTRIBUTES]}
    except Exception:  # noqa: BLE001 - if a user's object cannot be shown, only its span's attributes are lost
        return {}
    return {name: value for name, value in kept.items() if value is not None}


def _short(value: Any, depth: int = 2) -> Any:
    """The written form of one value; None to drop it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value[:_MAX_TEXT])
    if isinstance(value, int) and -_MAX_INTEGER <= value < _MAX_INTEGER:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping) and depth:
        items = list(value.items())[:_MAX_ITEMS]
        return {str(key)[:_MAX_TEXT]: _short(each, depth - 1) for key, each in items}
    if isinstance(value, list | tuple) and depth:
        return [_short(each, depth - 1) for each in value[:_MAX_ITEMS]]
    return str(value)[:_MAX_TEXT]
