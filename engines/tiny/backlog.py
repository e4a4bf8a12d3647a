"""What is to be generated but is not in the batch: calls that wait, rows that a pause took out, calls that it holds."""

from collections import deque
from collections.abc import Callable

from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.calls import PromptCall
from forebay.engines.tiny.rows import ChoiceRow

MAX_PREFILL_TOKENS = 2048
"""Prompt tokens read between two steps (one longer prompt is read whole), so that newcomers do not stall the rows."""


class Backlog:
    """First come, first served. While generation is paused, new calls are set aside: no load counts them."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.waiting: deque[PromptCall] = deque()
        self.retracted: list[ChoiceRow] = []
        self._set_aside: list[PromptCall] = []

    def __bool__(self) -> bool:
        return bool(self.waiting or self.retracted)

    @property
    def num_choices(self) -> int:
        """The choices that wait to enter the batch."""
        return len(self.retracted) + sum(call.n for call in self.waiting)

    def add(self, call: PromptCall) -> None:
        """Take a new call."""
        (self.waiting if self.mode is None else self._set_aside).append(call)

    def resume(self) -> None:
        """Generation goes on: what was set aside waits its turn."""
        self.mode = None
        self.waiting.extend(self._set_aside)
        self._set_aside.clear()

    def fitting(self, num_free: int) -> list[PromptCall]:
        """The calls to admit into ``num_free`` rows; they stay in the queue until ``admitted``."""
        calls: list[PromptCall] = []
        num_read, num_free = 0, num_free - len(self.retracted)
        for call in self.waiting:
            # The choices of a call enter together, since they share its prefill. The queue stays in order: a wide
            # call at its head is not overtaken by narrow ones, which could go on for ever.
            num_free -= call.n
            if num_free < 0 or num_read >= MAX_PREFILL_TOKENS:
                break
            num_read += len(call.prompt_ids)
            calls.append(call)
        return calls

    def admitted(self, num_calls: int) -> None:
        """The first calls and all rows have entered the batch."""
        self.retracted.clear()
        for _ in range(num_calls):
            self.waiting.popleft()

    def drop(self, matches: Callable[[PromptCall], bool]) -> list[PromptCall]:
        """Take out calls that wait."""
        dropped = [call for call in self.waiting if matches(call)]
        self.waiting = deque(call for call in self.waiting if not matches(call))
        return dropped

    def drop_retracted(self, matches: Callable[[PromptCall], bool]) -> list[ChoiceRow]:
        """Take out rows that wait."""
        dropped = [row for row in self.retracted if matches(row.call)]
        self.retracted = [row for row in self.retracted if not matches(row.call)]
        return dropped

    def drop_set_aside(self, matches: Callable[[PromptCall], bool]) -> list[PromptCall]:
        """Take out calls that a pause has set aside. Aborts by id miss these, as in SGLang."""
        dropped = [call for call in self._set_aside if matches(call)]
        self._set_aside = [call for call in self._set_aside if not matches(call)]
        return dropped

    def clear(self) -> set[PromptCall]:
        """Take out everything that was on its way into the batch."""
        calls = set(self.waiting) | {row.call for row in self.retracted}
        self.waiting.clear()
        self.retracted.clear()
        return calls
