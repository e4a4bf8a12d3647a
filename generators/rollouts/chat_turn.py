"""A turn of a rollout as far as it is traced: from the call of ``chat.completions.create`` to its reply, or the end of
its stream."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from forebay.engines.capture.call_spans import CallSpan, end_turn
from forebay.engines.capture.turn import Turn
from forebay.telemetry.tracing.tracer import SpanHandle


class ChatTurn:
    """Around one call of a rollout function. A call that is no chat is no turn: its ``span`` is None.

    A turn whose answer is a stream goes on after the ``with``, until ``end``.
    """

    def __init__(self, span: SpanHandle | None = None) -> None:
        self.span = span
        self.call: CallSpan | None = None
        """The newest of its HTTP calls."""
        self._is_stream = False

    def note_stream(self) -> None:
        """The answer will come piece by piece: whoever reads it says ``end``."""
        self._is_stream = True

    def note_answer(self, *, is_whole: bool) -> None:
        """The newest call was answered; one that nobody reads for the record has ended."""
        assert self.call is not None
        if is_whole:
            self.call.note_answer()
        elif not self._is_stream:
            self.call.end()

    def end(self, choices: Iterable[Turn] = (), **at: Any) -> None:
        """The answer is there, with these choices. Only the first end counts."""
        if self.span is not None:
            end_turn(self.span, choices, **at)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end(error=kind.__name__)
        elif not self._is_stream:
            self.end()
