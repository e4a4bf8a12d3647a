"""Reads verl's profile log, ``{folder}/step_{n}/worker_{id}.jsonl``, as a timeline, one step at a time.

Any name of a worker, any place of the ids, and any first step number are accepted. ``verl_lines.py`` parses lines,
``verl_attempts.py`` builds attempts.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis.requests import request_of
from forebay.telemetry.analysis.timeline import NS, ProfileStep
from forebay.telemetry.analysis.trust import CLEARLY, times_too_long
from forebay.telemetry.analysis.verl_attempts import attempt_of, own_times
from forebay.telemetry.analysis.verl_lines import (
    ABORTS,
    COMPLETE,
    GENERATION,
    LENGTH_STATS,
    MONITORING,
    PADDINGS,
    STEP_TOTAL,
    VerlLine,
    number_of,
    phase_of,
    read_lines,
)
from forebay.telemetry.attempts import Attempt
from forebay.telemetry.tracing.read_trace import BadLines

MAX_DEPTH = 3
"""Levels of folders between the given one and the steps."""
_STEP = re.compile(r"(?:(?:global_)?step[_-]?)?(\d+)")


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
            for path in _files(folder):
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
        self.notes += _missing_parts(files)


def find_steps(folder: Path) -> list[tuple[int, Path]]:
    """The folders of steps in ``folder``, at most ``MAX_DEPTH`` levels down; empty without such a log."""
    found: dict[Path, list[tuple[int, Path]]] = defaultdict(list)
    level = [folder]
    for depth in range(MAX_DEPTH + 2):
        if depth:
            level = [child for path in level if path.is_dir() for child in path.iterdir() if child.name[0] != "."]
        for path in level:
            match = _STEP.fullmatch(path.name)
            if match and _files(path, "" if "step" in path.name else "worker_"):
                found[path.parent].append((int(match[1]), path))
    if len(found) > 1:
        names = ", ".join(sorted(str(place.relative_to(folder)) for place in found if place != folder.parent))
        raise InvalidInput(f"{folder} has the logs of several experiments: {names}", hint="name the folder of one log")
    return sorted(next(iter(found.values()), []))


def _files(folder: Path, prefix: str = "") -> list[Path]:
    return sorted(path for ending in ("jsonl", "jsonl.gz") for path in folder.glob(f"{prefix}*.{ending}"))


def _missing_parts(files: Mapping[int, set[str]]) -> Iterator[str]:
    """Notes on what is missing. ``files``: by number of the step, the names of its files."""
    seen = Counter(name for own in files.values() for name in own)
    usual = {name for name, number in seen.items() if 2 * number > len(files)}
    lacking = [f"{number} ({', '.join(sorted(usual - own))})" for number, own in files.items() if usual - own]
    if lacking:
        yield f"Files are missing from the log in {len(lacking)} steps: {', '.join(lacking[:5])}."
    first, last = min(files, default=0), max(files, default=-1)
    # Steps may also be numbered, or logged, at longer distances.
    if 0 < (num_gone := last - first + 1 - len(files)) < len(files) / 2:
        gone = [str(number) for number in range(first, last) if number not in files]
        yield f"{num_gone} steps are missing from the log: {', '.join(gone[:5])}."


class _StepLines:
    """The lines of one step, grouped by request and worker."""

    def __init__(self) -> None:
        self.by_request: dict[str, list[VerlLine]] = defaultdict(list)
        self.by_worker: dict[str, list[VerlLine]] = defaultdict(list)
        self.totals: list[VerlLine] = []
        self.is_miscounted = False
        self._begin, self._end = 1 << 63, 0

    def add(self, line: VerlLine) -> None:
        self._begin, self._end = min(self._begin, line.begin), max(self._end, line.end)
        if line.event == STEP_TOTAL and line.d is not None:
            self.totals.append(line)
        elif line.event in PADDINGS:
            pass
        elif line.request_id:
            self.by_request[line.request_id].append(line)
        elif line.event in ABORTS:
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
            ends = [line.worker for line in lines if line.event == COMPLETE]
            step.num_repeated += len(set(ends)) < len(ends)
            if (times := times_too_long(lines)) > CLEARLY:
                step.overlong[request.request_id] = times
        for worker, own in self.by_worker.items():
            self.is_miscounted |= _add_unlisted(step, worker, own)
            totals = [line for line in self.totals if line.worker == worker]
            if (times := times_too_long([*totals, *own], STEP_TOTAL)) > CLEARLY:
                step.overlong[""] = times
            if phases := _phases_of_worker(own):
                step.worker_phases[worker] = phases
            stats = [line.info for line in own if line.event == LENGTH_STATS]
            step.response_tokens += [length for info in stats for length in _lengths(info)]
        # The longest answer that was stopped for its length.
        step.length_cap = max((each.sampled_tokens for each in step.requests if each.is_capped), default=0) or None
        return step

    def attempts(self) -> Iterator[tuple[Attempt, list[VerlLine]]]:
        """The attempt of each request with its lines, which are then forgotten."""
        has_ends = any(line.event == COMPLETE for own in self.by_request.values() for line in own)
        workers = {line.worker for own in self.by_request.values() for line in own}
        windows = {worker: self._window(worker) for worker in workers}
        for request_id in list(self.by_request):
            own = self.by_request.pop(request_id)
            ended = dict.fromkeys(line.worker for line in own if line.event == COMPLETE)
            parts = {request_id: own}
            if len(ended) > 1:  # then there is a request of this id at each of these workers
                parts = {f"{name}/{request_id}": [line for line in own if line.worker == name] for name in ended}
            for name, lines in parts.items():
                yield attempt_of(name, lines, windows[lines[0].worker], has_ends), lines

    def _bounds(self) -> tuple[int, int]:
        begin = min((line.begin for line in self.totals), default=self._begin)
        return begin, max((line.end for line in self.totals), default=self._end)

    def _window(self, worker: str) -> tuple[int, int]:
        """When ``worker`` generated. The time of an aborted request is clipped to this."""
        for event in GENERATION:
            own = [line for line in self.by_worker[worker] if line.event == event and line.d]
            if own:
                return min(line.begin for line in own), max(line.end for line in own)
        return self._bounds()


def _phases_of_worker(own: list[VerlLine]) -> dict[str, float]:
    timed = [(line, line.info) for line in own if line.d is not None]
    phases = {phase_of(line.event): 0.0 for line, _ in timed}
    for line, _, begin, end in own_times(timed):
        phases[phase_of(line.event)] += (end - begin) * NS
    return phases


def _add_unlisted(step: ProfileStep, worker: str, own: list[VerlLine]) -> bool:
    """Add the requests that only the lines about monitoring count. Returns True if these count too few."""
    # A log that was written twice has each of these lines twice.
    once = {line.end: line.info for line in own if line.event == MONITORING}.values()
    total = sum(int(number_of(info, "total_requests") or 0) for info in once)
    ended = sum(int(number_of(info, "completed_count", "total_requests") or 0) for info in once)
    listed = [request.ending for request in step.requests if request.worker == worker]
    missing = max(total - len(listed), 0)
    step.num_unlisted += missing
    step.num_unlisted_thrown += min(missing, max(total - ended - listed.count("aborted"), 0))
    return 0 < total < len(listed)


def _lengths(info: dict[str, Any]) -> list[int]:
    values = info.get("actual_response_tokens") or info.get("response_lengths")
    known = values if isinstance(values, list) else []
    return [int(value) for value in known if isinstance(value, int | float) and value >= 0]
