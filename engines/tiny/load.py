"""How busy the engine is, measured on the generation thread and read from the event loop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

WINDOW_S = 1.0
"""The throughput is that of the last whole window."""


@dataclass(frozen=True, slots=True)
class Load:
    """Rows running and waiting, tokens in the cache, tokens per second, and totals since the start."""

    max_rows: int
    max_tokens: int
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    num_prefilled: int = 0
    num_reused: int = 0
    prefill_s: float = 0.0

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that were not read again."""
        return self.num_reused / max(1, self.num_reused + self.num_prefilled)


class LoadMeter:
    """Keeps the newest ``Load``; replacing it whole makes it safe to read from another thread."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.load = Load(max_rows, max_tokens)
        self._window_start = time.monotonic()
        self._num_generated = 0

    def note(self, num_running: int, num_waiting: int, num_tokens: int) -> None:
        """Say what is in flight after a step."""
        self.load = replace(self.load, num_running=num_running, num_waiting=num_waiting, num_tokens=num_tokens)

    # Without this an engine that has nothing to do would tell the throughput of its last window for ever.
    def idle(self) -> None:
        """Say that nothing is in flight."""
        self.load = replace(self.load, num_running=0, num_waiting=0, num_tokens=0, tokens_per_s=0.0)
        self._window_start, self._num_generated = time.monotonic(), 0

    def generated(self, num_tokens: int) -> None:
        """Count tokens that were generated."""
        self._num_generated += num_tokens
        elapsed_s = time.monotonic() - self._window_start
        if elapsed_s >= WINDOW_S:
            self.load = replace(self.load, tokens_per_s=self._num_generated / elapsed_s)
            self._window_start, self._num_generated = time.monotonic(), 0

    def reused(self, num_tokens: int) -> None:
        """Count a prompt that was read before."""
        self.load = replace(self.load, num_reused=self.load.num_reused + num_tokens)

    @contextmanager
    def prefilling(self, num_tokens: int) -> Iterator[None]:
        """Count and time the reading of a prompt."""
        start = time.monotonic()
        yield
        self.load = replace(
            self.load,
            num_prefilled=self.load.num_prefilled + num_tokens,
            prefill_s=self.load.prefill_s + time.monotonic() - start,
        )
