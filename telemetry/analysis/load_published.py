"""Logs in the published layout, ``{folder}/step_{n}/worker_{id}.jsonl``, as a timeline; one step at a time.

Whatever a line calls its worker, wherever its ids stand, and from whichever number the steps count.
``published_lines.py`` reads lines, ``published_events.py`` knows the events, ``published_requests.py`` makes requests.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis.published.deepest_time import TimedEvent, seconds_by_phase, segments
from forebay.telemetry.analysis.published.published_events import (
    COMPLETE,
    LENGTH_STATS,
    MONITORING,
    PADDING,
    STEP_TOTAL,
    WORKER_DEPTHS,
    is_abort,
    phase_of,
)
from forebay.telemetry.analysis.published.published_lines import PublishedLine, read_lines
from forebay.telemetry.analysis.published.published_requests import request_of
from forebay.telemetry.analysis.timeline import ProfileStep, Request
from forebay.telemetry.tracing.read_trace import BadLines

MAX_DEPTH = 3
"""Folders between the one that is given and the steps."""
_STEP = re.compile(r"(?:step[_-]?)?(\d+)")
_GENERATING = ("async_generate_duration", "engine_async_generate")


@dataclass(slots=True)
class _StepLines:
    """The lines of one step, sorted by what they are about."""

    by_request: dict[str, list[PublishedLine]] = field(default_factory=lambda: defaultdict(list))
    by_worker: dict[str, list[PublishedLine]] = field(default_factory=lambda: defaultdict(list))
    totals: list[PublishedLine] = field(default_factory=list)
    begin_s: float = float("inf")
    end_s: float = float("-inf")


class PublishedLog:
    """A ``Timeline`` of a folder of such logs. ``InvalidInput`` where it has the logs of several experiments."""

    def __init__(self, folder: Path, *, first: int | None = None, last: int | None = None) -> None:
        self.source = str(folder)
        self.problems = BadLines()
        self.notes: list[str] = []
        self._without_total = 0
        self._folders = [
            (number, path)
            for number, path in find_steps(folder)
            if (first is None or number >= first) and (last is None or number <= last)
        ]

    def steps(self) -> Iterator[ProfileStep]:
        """By their numbers."""
        self.problems, self.notes = BadLines(), []
        self._without_total = 0
        for number, folder in self._folders:
            step = self._step(number, folder)
            if step is not None:
                yield step
        if self._without_total:
            self.notes.append(
                f"{self._without_total} of {len(self._folders)} steps log no {STEP_TOTAL}: "
                "each counts from its first start to its last end."
            )

    def _step(self, number: int, folder: Path) -> ProfileStep | None:
        lines = _StepLines()
        for path in sorted(folder.glob("*.jsonl")):
            for line in read_lines(path, path.stem.removeprefix("worker_"), self.problems.add):
                _sort_in(lines, line)
        if lines.begin_s > lines.end_s:
            return None
        self._without_total += not lines.totals
        return _step_of(number, lines)


def find_steps(folder: Path) -> list[tuple[int, Path]]:
    """The folders of steps in ``folder``, however deep up to ``MAX_DEPTH``; none where it has no such log."""
    found: dict[Path, list[tuple[int, Path]]] = defaultdict(list)
    for path in _folders_in(folder, MAX_DEPTH + 1):
        match = _STEP.fullmatch(path.name)
        if match and _is_step(path):
            found[path.parent].append((int(match[1]), path))
    if len(found) > 1:
        names = ", ".join(sorted(str(place.relative_to(folder)) for place in found if place != folder.parent))
        raise InvalidInput(f"{folder} has the logs of several experiments: {names}", hint="name the folder of one")
    return sorted(next(iter(found.values()), []))


def _is_step(folder: Path) -> bool:
    pattern = "*.jsonl" if folder.name.startswith("step") else "worker_*.jsonl"
    return any(folder.glob(pattern))


def _folders_in(folder: Path, depth: int) -> Iterator[Path]:
    if not folder.is_dir():
        return
    yield folder
    if depth > 0:
        for child in folder.iterdir():
            if child.is_dir() and not child.name.startswith("."):
                yield from _folders_in(child, depth - 1)


def _sort_in(lines: _StepLines, line: PublishedLine) -> None:
    lines.begin_s = min(lines.begin_s, line.begin_s)
    lines.end_s = max(lines.end_s, line.end_s)
    if line.event == STEP_TOTAL and line.duration_s is not None:
        lines.totals.append(line)
    elif line.request_id:
        lines.by_request[line.request_id].append(line)
    elif is_abort(line.event):
        if not line.event.endswith(PADDING):
            lines.by_request[f"aborted-{len(lines.by_request)}"].append(line)
    else:
        lines.by_worker[line.worker].append(line)


def _step_of(number: int, lines: _StepLines) -> ProfileStep:
    step = ProfileStep(
        str(number),
        min((line.begin_s for line in lines.totals), default=lines.begin_s),
        max((line.end_s for line in lines.totals), default=lines.end_s),
        is_total_given=bool(lines.totals),
    )
    step.requests = list(_requests(lines, step))
    for worker, own in lines.by_worker.items():
        phases = _phases_of_worker(own)
        if phases:
            step.worker_phases[worker] = phases
        for line in own:
            if line.event == LENGTH_STATS:
                step.response_tokens += _lengths(line.info)
    step.length_cap = _cap(step)
    return step


def _requests(lines: _StepLines, step: ProfileStep) -> Iterator[Request]:
    has_ends = any(line.event == COMPLETE for own in lines.by_request.values() for line in own)
    for request_id, own in lines.by_request.items():
        # The filling of an aborted request's place may be all that a worker's file has of it: no request of its own.
        if any(not line.event.endswith(PADDING) for line in own):
            yield request_of(request_id, own, _window(lines.by_worker.get(own[0].worker, []), step), has_ends)


def _window(own: list[PublishedLine], step: ProfileStep) -> tuple[float, float]:
    """When the worker of a request generated: the seconds of one that was thrown away are clipped to it."""
    for event in (MONITORING, *_GENERATING):
        spans = [(line.begin_s, line.end_s) for line in own if line.event == event and line.duration_s]
        if spans:
            return min(spans)[0], max(end_s for _, end_s in spans)
    return step.begin_s, step.end_s


def _phases_of_worker(own: list[PublishedLine]) -> dict[str, float]:
    timed = [line for line in own if line.duration_s is not None and line.event != MONITORING]
    if not any(line.event in _GENERATING for line in timed):
        timed += [line for line in own if line.event == MONITORING and line.duration_s is not None]
    timed_events = [
        TimedEvent(line.begin_s, line.end_s, WORKER_DEPTHS.get(line.event, 2), _name_of(line.event)) for line in timed
    ]
    if not timed_events:
        return {}
    phases = dict.fromkeys((stretch.phase for stretch in timed_events), 0.0)
    begin_s = min(stretch.begin_s for stretch in timed_events)
    end_s = max(stretch.end_s for stretch in timed_events)
    return phases | seconds_by_phase(list(segments(timed_events, begin_s, end_s)))


def _name_of(event: str) -> str:
    return "async_generate" if event == MONITORING else phase_of(event)


def _lengths(info: dict[str, Any]) -> list[int]:
    for key in ("actual_response_tokens", "response_lengths"):
        values = info.get(key)
        if isinstance(values, list) and values:
            return [int(value) for value in values if isinstance(value, int | float) and value >= 0]
    return []


def _cap(step: ProfileStep) -> int | None:
    """The most that an answer has which was ended for its length."""
    capped = max((request.sampled_tokens for request in step.requests if request.is_capped), default=0)
    return capped or None
