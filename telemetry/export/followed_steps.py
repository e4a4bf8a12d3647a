"""A trace that grows as steps that are written one after the other, each once nothing of it can change any more."""

import time
from collections.abc import Callable
from contextlib import suppress

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis.timeline import Problem, Timeline
from forebay.telemetry.export.published import PublishedExport
from forebay.telemetry.tracing.read_trace import TraceLine

SHARE = 9.0
"""A look at all of the log is followed by a pause of so many times what it took."""


class FollowedSteps:
    """Takes a log's lines as the sign that there is more, and reads its steps anew: a line alone makes none."""

    def __init__(self, load: Callable[[], Timeline], export: PublishedExport) -> None:
        self._load = load
        self._export = export
        self._has_news = False
        self._next_look_s = 0.0
        self.num_steps = 0
        self.problems: list[Problem] = []
        self.num_problems = 0

    def add(self, _line: TraceLine) -> None:
        """There is more."""
        self._has_news = True

    def flush(self) -> None:
        """Write the steps that are complete: all but the last, whose requests may still come."""
        began_s = time.monotonic()
        if self._has_news and began_s >= self._next_look_s:
            self._has_news = False
            with suppress(InvalidInput):  # a head alone is no log yet
                self._write(num_kept_back=1)
            self._next_look_s = time.monotonic() + SHARE * (time.monotonic() - began_s)

    def finish(self) -> None:
        """Write the rest."""
        notes = self._write(num_kept_back=0)
        self._export.finish(notes)

    def _write(self, num_kept_back: int) -> list[str]:
        timeline = self._load()
        held = []
        for number, step in enumerate(timeline.steps()):
            if number < self.num_steps:
                continue
            held.append(step)
            while len(held) > num_kept_back:
                self._export.add(held.pop(0), timeline.notes)
                self.num_steps += 1
        self.problems, self.num_problems = timeline.problems, timeline.num_problems
        return timeline.notes
