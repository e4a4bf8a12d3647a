"""Reads verl's profile log, ``{folder}/step_{n}/worker_{id}.jsonl``, as a timeline, one step at a time.

Any name of a worker, any place of the ids, and any first step number are accepted. ``verl_lines.py`` parses lines,
``verl_attempts.py`` builds attempts.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis.requests import request_of
from forebay.telemetry.analysis.timeline import NS, ProfileStep
from forebay.telemetry.analysis.trust import CLEARLY
from forebay.telemetry.analysis.verl_attempts import VerlEvent, attempt_of, own_times
from forebay.telemetry.analysis.verl_checks import add_unlisted, is_repeated, missing_parts, times_too_long
from forebay.telemetry.analysis.verl_lines import (
    COMPLETE,
    LENGTH_STATS,
    MONITORING,
    PADDING,
    STEP_TOTAL,
    WORKER_DEPTHS,
    VerlLine,
    is_abort,
    phase_of,
    read_lines,
)
from forebay.telemetry.attempts import Attempt
from forebay.telemetry.tracing.exclusive_time import exclusive_shares
from forebay.telemetry.tracing.read_trace import BadLines

MAX_DEPTH = 3
"""Levels of folders between the given one and the steps."""
_STEP = re.compile(r"(?:(?:global_)?step[_-]?)?(\d+)")
_FILES = ("*.jsonl", "*.jsonl.gz")


class VerlLog:
    """The ``Timeline`` of a folder of such logs. Raises ``InvalidInput`` if it has the logs of several experiments."""

    def __init__(self, folder: Path) -> None:
        self.source = str(folder)
        self.problems = BadLines()
        self.notes: list[str] = []
        self._folders = find_steps(folder)

    def steps(self) -> Iterator[ProfileStep]:
        """Steps by number."""
        for number, lines in self._read():
            yield lines.as_step(str(number))

    def attempts(self) -> Iterator[list[Attempt]]:
        """For each step, the attempts of its requests, without data used only in reports."""
        for _, lines in self._read():
            yield [attempt for attempt, _ in lines.attempts()]

    def _read(self) -> "Iterator[tuple[int, _StepLines]]":
        self.problems, self.notes = BadLines(), []
        files: dict[int, set[str]] = defaultdict(set)
        without_total = miscounted = 0
        for number, folder in self._folders:
            lines = _StepLines()
            for path in sorted(path for pattern in _FILES for path in folder.glob(pattern)):
                name = path.name.partition(".")[0]
                for line in read_lines(path, name.removeprefix("worker_"), self.problems.add):
                    lines.add(line)
                    files[number].add(name)
            if number in files:
                without_total += not lines.totals
                yield number, lines
                miscounted += lines.is_miscounted
        if without_total:
            self.notes.append(
                f"{without_total} of {len(files)} steps have no {STEP_TOTAL} in the log: "
                "each is counted from its first start to its last end."
            )
        if miscounted:
            self.notes.append(f"{miscounted} of {len(files)} steps have lines of more requests than were monitored.")
        self.notes += missing_parts(files)


def find_steps(folder: Path) -> list[tuple[int, Path]]:
    """The folders of steps in ``folder``, at most ``MAX_DEPTH`` levels down; empty without such a log."""
    found: dict[Path, list[tuple[int, Path]]] = defaultdict(list)
    for path in _folders_in(folder, MAX_DEPTH + 1):
        match = _STEP.fullmatch(path.name)
        if match and _is_step(path):
            found[path.parent].append((int(match[1]), path))
    if len(found) > 1:
        names = ", ".join(sorted(str(place.relative_to(folder)) for place in found if place != folder.parent))
        raise InvalidInput(f"{folder} has the logs of several experiments: {names}", hint="name the folder of one log")
    return sorted(next(iter(found.values()), []))


def _is_step(folder: Path) -> bool:
    prefix = "" if "step" in folder.name else "worker_"
    return any(True for pattern in _FILES for _ in folder.glob(prefix + pattern))


def _folders_in(folder: Path, depth: int) -> Iterator[Path]:
    if not folder.is_dir():
        return
    yield folder
    if depth > 0:
        for child in folder.iterdir():
            if child.is_dir() and not child.name.startswith("."):
                yield from _folders_in(child, depth - 1)


class _StepLines:
    """The lines of one step, grouped by request and worker."""

    def __init__(self) -> None:
        self.by_request: dict[str, list[VerlLine]] = defaultdict(list)
        self.by_worker: dict[str, list[VerlLine]] = defaultdict(list)
        self.totals: list[VerlLine] = []
        self.is_miscounted = False
        self._begin, self._end = 1 << 63, 0

    def add(self, line: VerlLine) -> None:
        if (begin := line.begin) < self._begin:
            self._begin = begin
        if line.end > self._end:
            self._end = line.end
        if line.event == STEP_TOTAL and line.d is not None:
            self.totals.append(line)
        elif line.request_id:
            self.by_request[line.request_id].append(line)
        elif is_abort(line.event):
            if not line.event.endswith(PADDING):
                self.by_request[f"aborted-{len(self.by_request)}"].append(line)
        else:
            self.by_worker[line.worker].append(line)

    def as_step(self, name: str) -> ProfileStep:
        """The step as a report needs it. Forgets the lines of its requests."""
        begin, end = self._bounds()
        step = ProfileStep(name, begin * NS, end * NS)
        for attempt, lines in self.attempts():
            request = request_of([attempt])
            request.is_used = request.ending == "finished"
            step.requests.append(request)
            step.num_repeated += is_repeated(lines)
            if (times := times_too_long(lines)) > CLEARLY:
                step.overlong[request.request_id] = times
        self.is_miscounted = not add_unlisted(step, (line for own in self.by_worker.values() for line in own))
        for worker, own in self.by_worker.items():
            totals = [line for line in self.totals if line.worker == worker]
            if (times := times_too_long([*totals, *own], STEP_TOTAL)) > CLEARLY:
                step.overlong[""] = times
            if phases := _phases_of_worker(own):
                step.worker_phases[worker] = phases
            for line in own:
                if line.event == LENGTH_STATS:
                    step.response_tokens += _lengths(line.info)
        # The longest answer that was stopped for its length.
        step.length_cap = max((each.sampled_tokens for each in step.requests if each.is_capped), default=0) or None
        return step

    def attempts(self) -> Iterator[tuple[Attempt, list[VerlLine]]]:
        """The attempt of each request with its lines, which are then forgotten."""
        has_ends = any(line.event == COMPLETE for own in self.by_request.values() for line in own)
        workers = {line.worker for own in self.by_request.values() for line in own}
        windows = {worker: self._window(worker) for worker in workers}
        for request_id, own in self._requests():
            # A worker's file may contain only the filled slot of an aborted request.
            if any(not line.event.endswith(PADDING) for line in own):
                yield attempt_of(request_id, own, windows[own[0].worker], has_ends), own

    def _requests(self) -> Iterator[tuple[str, list[VerlLine]]]:
        """Each request with its lines. An id that ended at several workers names a request of each."""
        for request_id in list(self.by_request):
            own = self.by_request.pop(request_id)
            workers = dict.fromkeys(line.worker for line in own if line.event == COMPLETE)
            if len(workers) < 2:
                yield request_id, own
            else:
                for worker in workers:
                    yield f"{worker}/{request_id}", [line for line in own if line.worker == worker]

    def _bounds(self) -> tuple[int, int]:
        begin = min((line.begin for line in self.totals), default=self._begin)
        return begin, max((line.end for line in self.totals), default=self._end)

    def _window(self, worker: str) -> tuple[int, int]:
        """When ``worker`` generated. The time of an aborted request is clipped to this."""
        for event in (MONITORING, *WORKER_DEPTHS):
            spans = [
                (line.begin, line.end) for line in self.by_worker.get(worker, []) if line.event == event and line.d
            ]
            if spans:
                return min(spans)[0], max(end for _, end in spans)
        return self._bounds()


def _phases_of_worker(own: list[VerlLine]) -> dict[str, float]:
    timed = [line for line in own if line.d is not None and line.event != MONITORING]
    if not any(line.event in WORKER_DEPTHS for line in timed):
        timed += [line for line in own if line.event == MONITORING and line.d is not None]
    events = [
        VerlEvent(line.begin, line.end, WORKER_DEPTHS.get(line.event, 2), phase_of(line.event), {}) for line in timed
    ]
    if not events:
        return {}
    intervals = [(event.phase, begin, end, "", "") for event, begin, end in own_times(events)]
    begin, end = min(event.begin for event in events), max(event.end for event in events)
    shares = dict.fromkeys((event.phase for event in events), 0.0) | exclusive_shares(intervals, begin, end)
    return {name: share * NS for name, share in shares.items()}


def _lengths(info: dict[str, Any]) -> list[int]:
    for key in ("actual_response_tokens", "response_lengths"):
        values = info.get(key)
        if isinstance(values, list) and values:
            return [int(value) for value in values if isinstance(value, int | float) and value >= 0]
    return []
