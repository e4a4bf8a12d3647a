"""To what spans belong, an attempt of a rollout or the run: it makes them, knows which are open, and writes them."""

import logging
from typing import Any, Protocol

from forebay.telemetry.tracing.exclusive_time import PlainInterval
from forebay.telemetry.tracing.records import Open, Record, Span
from forebay.telemetry.tracing.span_handle import SpanHandle, current_span, short_attributes
from forebay.telemetry.tracing.trace_ids import new_span_id, trace_id

logger = logging.getLogger(__name__)

LONG_NS = 10_000_000_000
"""A span that has lasted so long is noted while it is still open."""
LATE_NS = 2_000_000_000
"""How much longer its note waits for what ``on_open`` could not tell at once."""


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

    def span(self, name: str, /, *, turn: int | None = None, **at: Any) -> SpanHandle:
        """For a ``with``, within which it is the current span, so that spans inside are its children."""
        return self.begin(name, turn=turn, **at)

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
        """A span that is closed by its ``end``; ``up``: the one around it, if it is not the current one."""
        above, turn = self._place(up, turn)
        return self._opened(name, new_span_id(), above, turn, begun, at)

    def begin_inside(self, above: SpanHandle, name: str, at: dict[str, Any]) -> SpanHandle:
        """Of ``SpanScope``: what ``begin`` does in the context of ``above``, which is of this scope."""
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
        """Of ``SpanScope``."""
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
        """Of ``SpanScope``."""
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
