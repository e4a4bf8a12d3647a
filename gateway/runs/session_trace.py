"""What is recorded of one session: a turn for each chat of its agent, what it waits for, and each call to an engine."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, NamedTuple

import msgspec

from forebay.engines.capture.call_spans import CallSpan, end_turn, ended
from forebay.engines.capture.turn import Turn
from forebay.gateway.runs.foreign_traces import HeldCall
from forebay.gateway.runs.open_calls import OpenCalls, Up
from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.span_handle import SpanHandle
from forebay.telemetry.tracing.trace_ids import read_traceparent


class Parent(NamedTuple):
    """What the ``traceparent`` of an agent's call comes to."""

    up: str | None = None
    """A span of our own trace: the call's parent."""
    link: str = ""
    """The header, where it is of another trace. By it both know of each other."""


class SessionTrace:
    """``attempt`` is the rollout's, ``is_foreign`` if no run process of ours has opened it.

    ``held`` has the spans of a call until it is known which rollout it is of.
    """

    def __init__(
        self,
        calls: OpenCalls,
        attempt: AttemptTrace,
        *,
        step: int = 0,
        is_foreign: bool = False,
        held: HeldCall | None = None,
    ) -> None:
        self.held = held
        self._calls = calls
        self._attempt = attempt
        self._step = step
        self._is_foreign = is_foreign
        self._numbers = count()

    def parent(self, traceparent: str | None) -> Parent:
        """Where a call belongs that came with this header."""
        named = read_traceparent(traceparent)
        if named is None:
            return Parent()
        if named.trace_id == self._attempt.trace_id and self.held is None:
            return Parent(up=named.span_id)
        return Parent(link=(traceparent or "").strip())

    def begin_turn(self, parent: Parent) -> SpanHandle:
        """The agent asks."""
        at: dict[str, Any] = {"link": parent.link} if parent.link else {}
        return self._attempt.turn(next(self._numbers), up=parent.up, **at)

    def end_turn(self, turn: SpanHandle, choices: Sequence[Turn], error: BaseException | None) -> None:
        """The agent has its answer, made of ``choices``, or the call failed. Of an error its kind is recorded."""
        at: dict[str, Any] = {} if error is None else {"error": type(error).__name__}
        if choices:
            at["finish_reason"] = choices[0].finish_reason
        end_turn(turn, choices, **at)

    def end_call(self, choices: Sequence[Turn]) -> None:
        """A call is over. One without ``choices`` is in no sample."""
        if self.held is not None and not choices:
            self.held.release()

    @contextmanager
    def engine_wait(self, up: Up) -> Iterator[None]:
        """Until an engine answers, and it is known what to ask it for."""
        with ended(self._attempt.begin("engine_wait", up=up)):
            yield

    def engine_call(self, up: Up, engine_url: str, rid: str) -> AbstractContextManager[CallSpan]:
        """Around one request to an engine. Whoever reads its answer ends the span, an error does so at once."""
        return self._calls.call(self._attempt, up, engine_url, rid)

    def turns(self) -> list[dict[str, Any]]:
        """The turns so far, each a ``TurnSummary`` as JSON."""
        return [msgspec.to_builtins(turn) for turn in self._attempt.turns()]

    def end(self, ending: str, *, is_last: bool = True) -> None:
        """The rollout is over. One that no run process of ours has opened gets its summary."""
        if self._is_foreign:
            uid, begun = self._attempt.uid, self._attempt.begun
            self._attempt.summary(ending=ending, is_last=is_last, instance=uid, started=begun, step=self._step)
