"""The requests of a step over time, for its picture: some of the requests, of some of the steps."""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappushpop

from forebay.telemetry.analysis.report import Finding, Lane, StepLanes, StepSummary
from forebay.telemetry.analysis.robust import longest, thinned
from forebay.telemetry.analysis.timeline import ProfileStep, Request

MOST_STEPS = 12
MOST_LANES = 64
MOST_PIECES = 300
"""Limit for one request: its longest pieces."""
_MOST_MOMENTS = 500
_LEAST_SHARE = 0.001
"""Share of the step. Shorter pieces could not be seen."""

_Piece = tuple[str, float, float]


class CostliestSteps:
    """Adds steps one at a time, and keeps the costliest: the longest ones, and those with findings."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, float, StepLanes | None]] = [(0.0, 0.0, None)] * MOST_STEPS

    def add(self, step: ProfileStep, summary: StepSummary, found: Iterable[Finding]) -> None:
        """Add a step and its findings."""
        cost = summary.seconds + sum(finding.seconds for finding in found)
        if step.requests and cost > self._kept[0][0]:
            heappushpop(self._kept, (cost, step.begin_s, lanes_of(step, summary)))

    def results(self) -> list[StepLanes]:
        """In chronological order."""
        by_begin = sorted(self._kept, key=lambda each: each[1])
        return [lanes for _, _, lanes in by_begin if lanes is not None]


def lanes_of(step: ProfileStep, summary: StepSummary) -> StepLanes:
    """The requests of ``step``, ordered by worker and begin."""
    waited_for = [part.path.request for part in summary.critical_path if part.path.request]
    last_end = max(step.requests, key=lambda request: request.end_s).request_id
    last = waited_for[-1] if waited_for else last_end
    lanes = [
        Lane(
            request=request.request_id,
            worker=request.worker,
            is_last=request.request_id == last,
            pieces=_pieces(step, request),
        )
        for request in _chosen(step.requests, last)
    ]
    return StepLanes(step=step.name, num_requests=len(step.requests), lanes=lanes, in_flight=_in_flight(step))


def _chosen(requests: Sequence[Request], last: str) -> list[Request]:
    """The request waited for last, the last ones to end, the slowest, and others evenly spread."""
    by_end = sorted(
        range(len(requests)), key=lambda place: (requests[place].request_id != last, -requests[place].end_s)
    )
    slowest = sorted(by_end, key=lambda place: -requests[place].duration_s)
    quarter = MOST_LANES // 4
    wanted = dict.fromkeys([*by_end[:quarter], *slowest[:quarter], *thinned(by_end, 2 * quarter), *by_end])
    chosen = [requests[place] for place in list(wanted)[:MOST_LANES]]
    return sorted(chosen, key=lambda request: (request.worker, request.begin_s, request.end_s))


def _pieces(step: ProfileStep, request: Request) -> list[_Piece]:
    begin_s = request.begin_s - step.begin_s
    pieces: list[_Piece] = []
    if request.events:
        pieces = [(each.name, each.begin_s - step.begin_s, each.end_s - each.begin_s) for each in request.events]
    else:  # only the summary was kept: its phases, one after another
        for name, seconds in request.phases.items():
            pieces.append((name, begin_s, seconds))
            begin_s += seconds
    return longest(_visible(pieces, _LEAST_SHARE * step.duration_s), MOST_PIECES, lambda piece: piece[2])


def _visible(pieces: Iterable[_Piece], least_s: float) -> list[_Piece]:
    """``pieces`` of at least ``least_s``. Adjacent ones of the same phase become one."""
    kept: list[_Piece] = []
    for name, begin_s, seconds in pieces:
        if kept and kept[-1][2] < least_s and kept[-1][0] != name:
            kept.pop()
        if kept and kept[-1][0] == name and begin_s - kept[-1][1] - kept[-1][2] < least_s:
            first_s = kept[-1][1]
            kept[-1] = (name, first_s, max(kept[-1][2], begin_s + seconds - first_s))
        else:
            kept.append((name, begin_s, seconds))
    return [(name, round(begin_s, 4), round(seconds, 4)) for name, begin_s, seconds in kept if seconds >= least_s]


def _in_flight(step: ProfileStep) -> list[tuple[float, int]]:
    changes: Counter[float] = Counter()
    for request in step.requests:
        changes[request.begin_s - step.begin_s] += 1
        changes[request.end_s - step.begin_s] -= 1
    running, counts = 0, []
    for moment in sorted(changes):
        running += changes[moment]
        counts.append((round(moment, 4), running))
    return thinned(counts, _MOST_MOMENTS)
