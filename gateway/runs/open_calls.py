"""The calls that engines are working on for one run: held while the engines are paused, noted when slow."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forebay.engines.capture.call_spans import CallSpan
from forebay.engines.ring import EngineRing
from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.span_handle import SpanHandle

Up = SpanHandle | str | None
"""The span around another one."""


class OpenCalls:
    """Made in the event loop of the calls. ``ring`` are the engines that they go to."""

    def __init__(self, ring: EngineRing) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._calls: set[CallSpan] = set()
        self._is_paused = False

    @contextmanager
    def call(self, trace: AttemptTrace, up: Up, engine_url: str, rid: str) -> Iterator[CallSpan]:
        """Around one request to an engine. Whoever reads its answer ends the span, an error does so at once."""
        call = CallSpan(trace, up, engine_url, rid, self._ask_load)
        call.note_paused(self._is_paused)
        self._calls.add(call)
        try:
            with call.failing():
                yield call
        finally:
            self._calls.discard(call)

    def note_paused(self, is_paused: bool) -> None:
        """The engines are paused for their weights, or go on."""
        self._is_paused = is_paused
        for call in self._calls:
            call.note_paused(is_paused)

    def _ask_load(self, span: SpanHandle) -> Mapping[str, Any] | None:
        return self._ring.ask_load(span, self._loop)
