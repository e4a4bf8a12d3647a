"""Null objects used without tracing. They accept everything and keep nothing, so that callers need no ``if``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.records import Record, RolloutSummary, TurnSummary
from forebay.telemetry.tracing.run_tracer import Tracer, TraceSettings
from forebay.telemetry.tracing.spans import Scope, SpanHandle


class _NoSpan(SpanHandle):
    """A shared span without state."""

    @property
    def traceparent(self) -> str:
        return ""

    def set(self, **at: Any) -> None:
        pass

    def end(self, at_ns: int | None = None, **at: Any) -> None:
        pass

    def note_open(self, **at: Any) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "on_open":
            super().__setattr__(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class NoAttempt(AttemptTrace):
    """Drops everything recorded of the attempt."""

    def begin(self, *_: Any, **__: Any) -> SpanHandle:
        return NO_SPAN

    def turn(self, *_: Any, **__: Any) -> SpanHandle:
        return NO_SPAN

    def know_as(self, *_: Any, **__: Any) -> None:
        pass

    def take_over(self, *_: Any, **__: Any) -> None:
        pass

    def turns(self, *_: Any, **__: Any) -> list[TurnSummary]:
        return []

    def add(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def traceparent(self) -> str:
        return ""

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    def phases(self, *_: Any, **__: Any) -> dict[str, int]:
        return {}

    def summary(self, **fields: Any) -> RolloutSummary:
        fields.pop("until", None)
        known = {"t": 0, "d": 0, "id": "", "uid": "", "group": "", "instance": ""}
        return RolloutSummary(**{**known, **fields})


class _NoTracer(Tracer):
    """Does not even read the clock."""

    def write(self, record: Record) -> None:
        pass

    def watch(self, scope: Scope) -> None:
        pass

    def attempt(self, *_: Any, **__: Any) -> AttemptTrace:
        return NO_ATTEMPT

    def run_scope(self) -> Scope:
        return NO_ATTEMPT

    def close(self) -> None:
        pass


NO_TRACE: Tracer = _NoTracer(TraceSettings(folder="", run_id="", max_bytes=0), "run")
NO_ATTEMPT: AttemptTrace = NoAttempt(NO_TRACE, uid="", group="", attempt=0, is_kept=False)
NO_SPAN: SpanHandle = _NoSpan(NO_ATTEMPT, "", "", "", None, 0, {})
