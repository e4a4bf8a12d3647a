"""Work outside the batch: waiting calls, rows that a pause retracted, and calls that a pause set aside."""

from collections import deque
from collections.abc import Callable

from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.calls import PromptCall
from forebay.engines.tiny.rows import ChoiceRow

MAX_PREFILL_TOKENS = 2048
"""Prompt tokens read between two steps, so that new calls do not stall the rows. A longer prompt is read whole."""


class Backlog:
    """First come, first served. While generation is paused, new calls are set aside and count in no load."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.waiting: deque[PromptCall] = deque()
        self.retracted: list[ChoiceRow] = []
        self._set_aside: list[PromptCall] = []

    def __bool__(self) -> bool:
        return bool(self.waiting or self.retracted)

    @property
    def num_choices(self) -> int:
        """Number of choices that wait to enter the batch."""
        return len(self.retracted) + sum(call.n for call in self.waiting)

    def add(self, call: PromptCall) -> None:
        """Add a new call."""
        (self.waiting if self.mode is None else self._set_aside).append(call)

    def resume(self) -> None:
        """Resume generation and queue the calls that were set aside."""
        self.mode = None
        self.waiting.extend(self._set_aside)
        self._set_aside.clear()

    def fitting(self, num_free: int) -> list[PromptCall]:
        """Return the calls to admit into ``num_free`` rows; they stay in the queue until ``admitted``."""
        calls: list[PromptCall] = []
        num_read, num_free = 0, num_free - len(self.retracted)
        for call in self.waiting:
            # The choices of a call enter together, since they share its prefill. The queue stays in order: otherwise
            # narrow calls could overtake a wide call at its head forever.
            num_free -= call.n
            if num_free < 0 or num_read >= MAX_PREFILL_TOKENS:
                break
            num_read += len(call.prompt_ids)
            calls.append(call)
        return calls

    def admitted(self, num_calls: int) -> None:
        """Remove all retracted rows and the first ``num_calls`` calls, which have entered the batch."""
        self.retracted.clear()
        for _ in range(num_calls):
            self.waiting.popleft()

    def drop(self, matches: Callable[[PromptCall], bool]) -> list[PromptCall]:
        """Remove and return matching calls that wait."""
        dropped = [call for call in self.waiting if matches(call)]
        self.waiting = deque(call for call in self.waiting if not matches(call))
        return dropped

    def drop_retracted(self, matches: Callable[[PromptCall], bool]) -> list[ChoiceRow]:
        """Remove and return matching rows that wait."""
        dropped = [row for row in self.retracted if matches(row.call)]
        self.retracted = [row for row in self.retracted if not matches(row.call)]
        return dropped

    def drop_set_aside(self, matches: Callable[[PromptCall], bool]) -> list[PromptCall]:
        """Remove and return matching calls that a pause set aside. Aborts by id miss these, as in SGLang."""
        dropped = [call for call in self._set_aside if matches(call)]
        self._set_aside = [call for call in self._set_aside if not matches(call)]
        return dropped

    def clear(self) -> set[PromptCall]:
        """Remove and return everything that waits to enter the batch."""
        calls = set(self.waiting) | {row.call for row in self.retracted}
        self.waiting.clear()
        self.retracted.clear()
        return calls
