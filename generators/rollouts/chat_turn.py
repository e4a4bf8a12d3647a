"""Tracing of a turn: from the call of ``chat.completions.create`` to its reply, or to the end of its stream."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from forebay.engines.capture.call_spans import CallSpan, end_turn
from forebay.engines.capture.turn import Turn
from forebay.telemetry.tracing.tracer import SpanHandle


class ChatTurn:
    """Context of one call of a rollout function. If the call is not a chat, ``span`` is None.

    A turn with a streamed answer continues after the ``with``, until ``end``.
    """

    def __init__(self, span: SpanHandle | None = None) -> None:
        self.span = span
        self.call: CallSpan | None = None
        """The latest HTTP call of the turn."""
        self._is_stream = False

    def note_stream(self) -> None:
        """Note that the answer is a stream: its reader must call ``end``."""
        self._is_stream = True

    def note_answer(self, *, is_whole: bool) -> None:
        """Note that the latest call was answered. A call that is not recorded ends here."""
        assert self.call is not None
        if is_whole:
            self.call.note_answer()
        elif not self._is_stream:
            self.call.end()

    def end(self, choices: Iterable[Turn] = (), **at: Any) -> None:
        """End the turn with the choices of its answer. Only the first call counts."""
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
