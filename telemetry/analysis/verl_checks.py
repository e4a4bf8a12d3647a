"""Checks of verl's log: whether its durations can be true, and whether it is complete."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from forebay.telemetry.analysis.timeline import ProfileStep
from forebay.telemetry.analysis.trust import MILLISECONDS
from forebay.telemetry.analysis.verl_lines import COMPLETE, MONITORING, STATE, STEP_TOTAL, VerlLine, depth_of, number_of

_RESOLUTION_NS = 2_000
_NOT_ALONE = ("reward_duration", MONITORING, STEP_TOTAL)


def times_too_long(lines: list[VerlLine], event: str = COMPLETE) -> float:
    """How many times as long as the whole (``event``) its parts are, or it is itself by the time stamps of starts."""
    whole = max((line for line in lines if line.event == event), key=lambda line: line.d or 0, default=None)
    if whole is None or not whole.d:
        return 0.0
    starts = [line.end for line in lines if line.d is None and line.event.endswith("_start")]
    claimed = whole.d / max(whole.end - min(starts), 1) if starts else 0.0
    if claimed > MILLISECONDS:  # a start may be logged late, so only a wrong unit is certain
        return claimed
    events = [line.event for line in lines]
    least, most = whole.begin + _RESOLUTION_NS, whole.end + _RESOLUTION_NS
    parts = [
        (line.end - line.d, line.end)
        for line in lines
        if line.d and least < line.end <= most and (line.d > whole.d or _is_sequential(line.event, events))
    ]
    total, first, last = 0, 0, 0
    for begin, end in sorted(parts):
        if end > last + _RESOLUTION_NS:  # otherwise it is inside another part
            total += end - (begin if begin > first + _RESOLUTION_NS else last)
            first, last = begin, end
    return total / whole.d


def _is_sequential(event: str, events: list[str]) -> bool:
    """Whether verl runs ``event`` alone: a state of a request, or a phase that a worker has once."""
    if event.endswith("_duration"):
        return event not in _NOT_ALONE and events.count(event) == 1
    return depth_of(event) == STATE


def is_repeated(lines: Iterable[VerlLine]) -> bool:
    """Whether a request ended more than once at one worker."""
    ends = [line.worker for line in lines if line.event == COMPLETE]
    return len(set(ends)) < len(ends)


def add_unlisted(step: ProfileStep, of_workers: Iterable[VerlLine]) -> bool:
    """Add the requests that only the lines about monitoring count. Returns False if these count too few."""
    totals: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    # A log that was written twice has each of these lines twice.
    once = {(line.worker, line.end): line.info for line in of_workers if line.event == MONITORING}
    for (worker, _), info in once.items():
        totals[worker] += int(number_of(info, "total_requests") or 0)
        ended[worker] += int(number_of(info, "completed_count", "total_requests") or 0)
    is_true = True
    for worker, total in totals.items():
        listed = [request.ending for request in step.requests if request.worker == worker]
        is_true = is_true and len(listed) <= (total or len(listed))
        missing = max(total - len(listed), 0)
        step.num_unlisted += missing
        step.num_unlisted_thrown += min(missing, max(total - ended[worker] - listed.count("aborted"), 0))
    return is_true


def missing_parts(files: Mapping[int, set[str]]) -> Iterator[str]:
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
