"""Open spans, and to what they belong: an attempt of a rollout, or the run.

A ``Scope`` makes spans, knows which are open, and writes them to its recorder as they end.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from forebay.telemetry.tracing.attributes import short_attributes
from forebay.telemetry.tracing.exclusive_time import PlainInterval
from forebay.telemetry.tracing.records import Open, Record, Span
from forebay.telemetry.tracing.trace_ids import format_traceparent, new_span_id, trace_id

logger = logging.getLogger(__name__)

LONG_NS = 10_000_000_000
"""A span that has lasted so long is noted while it is still open."""
LATE_NS = 2_000_000_000
"""How much longer its note waits for what ``on_open`` could not tell at once."""


class SpanHandle(msgspec.Struct, eq=False):
    """An open span. None of its methods raises; it may be ended from any thread, and only the first end counts."""

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


class Recorder(Protocol):
    """What takes records."""

    run_id: str

    def now(self) -> int:
        """Nanoseconds since the Unix epoch."""

    def write(self, record: Record) -> None:
        """Take one."""

    def watch(self, scope: "Scope") -> None:
        """See to it that ``note_long`` is called now and then."""


class Scope:
    """Spans of one rollout's attempt, or (without a ``uid``) of the run. For use from any thread."""

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
        """What has ended, whether it is kept or not: of an attempt."""
        self._calls: dict[int | None, list[dict[str, Any]]] = {}
        """What is known of engine calls, by turn."""
        recorder.watch(self)

    @property
    def trace_id(self) -> str:
        """Of the rollout, or of the run."""
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
        """A span that is closed by its ``end``, or by a ``with``, within which it is the current one.

        ``up``: the one around it, if it is not the current one.
        """
        above, turn = self._place(up, turn)
        return self._opened(name, new_span_id(), above, turn, begun, at)

    def begin_inside(self, above: SpanHandle, name: str, at: dict[str, Any]) -> SpanHandle:
        """What ``begin`` does in the context of ``above``, which is of this scope."""
        # Flat, as ``ended`` is: the two are most of what a span costs.
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
        """A span that was measured elsewhere: from ``t`` on, for ``d``, both in nanoseconds."""
        above, turn = self._place(up, turn)
        self._opened(name, new_span_id(), above, turn, t, at).end(t + d)

    def ended(self, handle: SpanHandle, at_ns: int | None) -> None:
        """Note that ``handle`` ended, now or at ``at_ns``."""
        # What was open when its process was forked is its parent's to write.
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
                    at=short_attributes(at) if at else at,
                )
            )

    def note_open(self, handle: SpanHandle) -> None:
        """Write that ``handle`` is still open."""
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
                    at=short_attributes(handle.at).copy(),
                )
            )

    def note_long(self, now: int) -> None:
        """Write what has been open for long, each once."""
        for handle in list(self._open.values()):
            lasted = now - handle.begun
            if handle.is_noted or lasted < LONG_NS:
                continue
            if handle.on_open is None or lasted >= LONG_NS + LATE_NS:
                handle.note_open()
            else:
                _ask(handle)

    def forget_open(self) -> None:
        """In a process that was forked: what is open is its parent's."""
        self._open.clear()

    def _place(self, up: SpanHandle | str | None, turn: int | None) -> tuple[str, int | None]:
        """The id of the span around a new one, and the turn to which it belongs: else to the last that began."""
        above = current_span.get() if up is None else up
        if isinstance(above, str):
            return above, self._last_turn if turn is None else turn
        if above is None or above.scope is not self:
            return self._up, self._last_turn if turn is None else turn
        if turn is None:
            turn = above.turn if above.turn is not None else self._last_turn
        return above.id, turn

    def _opened(
        self, name: str, span_id: str, up: str, turn: int | None, begun: int | None, at: dict[str, Any]
    ) -> SpanHandle:
        handle = SpanHandle(self, name, span_id, up, turn, begun or self._now(), at)
        self._open[span_id] = handle
        return handle


def _ask(handle: SpanHandle) -> None:
    on_open, handle.on_open = handle.on_open, _nothing_yet
    if on_open is None or on_open is _nothing_yet:
        return
    try:
        more = on_open(handle)
    except Exception:  # whatever it could not find out, the note goes out
        logger.debug("nothing more is known of the open span %s", handle.name, exc_info=True)
        more = {}
    if more is not None:
        handle.note_open(**more)


def _nothing_yet(handle: SpanHandle) -> None:
    """It was asked before."""
