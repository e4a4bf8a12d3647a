"""What a step waited for: from the release of its data back to the trainer's request for it.

If the trainer asked after the last group was ready, the trainer was late. Otherwise the group that became ready last
delayed the read. The path goes back from the reply to the last sample written, and through its rollout: at each moment,
the event that ended last. The parts add up to the wait.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from forebay.telemetry.analysis.report import EventPath, PathPart
from forebay.telemetry.analysis.timeline import SURPLUS, Event, ProfileStep, ReadTimes, Request

LATE_TRAINER = "late_trainer"
"""The event on the path of a step that did not have to wait for any group."""

_STARTS = ("admission", "write")

SHORTEST_S = 1e-4
"""Shorter parts are clock differences or rounding, and are added to their neighbour."""


class PathOfWait(NamedTuple):
    """The path of one wait in chronological order."""

    begin_s: float
    end_s: float
    request: Request | None
    """The request that was waited for last."""
    parts: list[PathPart]


class CriticalPath(NamedTuple):
    """The paths of a step's waits in chronological order."""

    waits: list[PathOfWait]
    beyond_next_s: float | None
    """How much later the last group was ready than the one before; None if there is only one."""

    @property
    def parts(self) -> list[PathPart]:
        """All parts in chronological order."""
        return [part for wait in self.waits for part in wait.parts]


def critical_path(step: ProfileStep) -> CriticalPath:
    """The path of the step's waits, one after another if several reads delivered its groups."""
    paths: list[PathOfWait] = []
    beyond: list[float] = []
    until = step.begin_s
    for wait in _waits(step):
        begin, end = max(wait.asked_s, until), min(wait.satisfied_s, step.end_s)
        if end < begin:
            continue
        paths.append(_path_of_wait(step, wait, begin, end))
        beyond += _beyond_next(step, wait, begin, end)
        until = end
    return CriticalPath(paths, sum(beyond) if beyond else None)


def _waits(step: ProfileStep) -> list[ReadTimes]:
    if step.reads:
        return sorted(step.reads, key=lambda read: (read.asked_s, read.satisfied_s))
    # While rollouts still run, the trainer does not wait for the groups that are ready.
    groups = [] if step.is_open else list(step.ready_s)
    if step.asked_s is not None or not step.requests or step.ready_s:
        asked_s = step.begin_s if step.asked_s is None else step.asked_s
        satisfied_s = step.end_s if step.satisfied_s is None else step.satisfied_s
        return [ReadTimes(asked_s, satisfied_s, satisfied_s, step.released_by, groups)]
    # A log of workers: before and after its requests, a step spends its time on phases of the workers.
    needed = [request for request in step.requests if request.ending not in SURPLUS] or step.requests
    end_s = max(each.end_s for each in needed)
    return [ReadTimes(min(each.begin_s for each in needed), end_s, end_s)]


def _path_of_wait(step: ProfileStep, wait: ReadTimes, begin: float, end: float) -> PathOfWait:
    group = wait.by or max(wait.groups, key=lambda each: step.ready_s.get(each, begin), default="")
    ready = min(step.ready_s.get(group, end), end)
    is_late = bool(wait.groups) and group in step.ready_s and ready <= begin
    last = None if is_late else _last_written(step, group, end if step.is_open else ready)
    if last is None:
        path = EventPath(step=step.name, group="" if is_late else group, event=LATE_TRAINER if is_late else "unknown")
        return PathOfWait(begin, end, None, [PathPart(begin_s=begin, seconds=end - begin, path=path)])
    parts = _Backwards(step, last, begin, end)
    return PathOfWait(begin, end, last, parts.in_order())


def _last_written(step: ProfileStep, group: str, ready: float) -> Request | None:
    """The request whose end made the group ready. An open request still delays it."""
    members = [request for request in step.requests if request.group == group] if group else step.requests
    members = [request for request in members if request.ending not in SURPLUS]
    written = step.ready_by.get(group)
    for request in members:
        if request.request_id == written:
            return request
    in_time = [request for request in members if request.begin_s < ready]
    return max(in_time, key=lambda request: (request.ending == "open", min(request.end_s, ready)), default=None)


class _Backwards:
    """Walks from the release back to the trainer's request, through the request that was waited for."""

    def __init__(self, step: ProfileStep, request: Request, begin: float, end: float) -> None:
        self._step = step
        self._request = request
        self._begin = begin
        self._cursor = end
        self._parts: list[PathPart] = []

    def in_order(self) -> list[PathPart]:
        request = self._request
        largest = max(request.phases, key=request.phases.__getitem__, default="unknown")
        self._take(min(request.end_s, self._cursor), "buffer" if self._step.ready_s else "barrier_wait", of_step=True)
        for event in _by_last_end(request.events, self._cursor):
            if self._cursor <= max(self._begin, request.begin_s):
                break
            end = min(event.end_s, self._cursor)
            self._take(max(end, request.begin_s), "agent")
            self._take(max(event.begin_s, request.begin_s), event.name, turn=event.turn)
        self._take(request.begin_s, "agent" if request.events else largest)
        for event in _by_last_end(self._starts_of_others(), self._cursor):
            self._take(event.end_s, "queue", of_step=True)
            self._take(event.begin_s, event.name, of_step=True)
        self._take(self._begin, "queue", of_step=True)
        return self._parts[::-1]

    def _starts_of_others(self) -> list[Event]:
        """What earlier requests waited for before their first call: groups are started one after another."""
        return [
            event
            for other in self._step.requests
            if other.begin_s < self._request.begin_s
            for event in takewhile(lambda event: event.turn is None, other.events)
            if event.name in _STARTS and event.end_s > self._begin
        ]

    def _take(self, until: float, event: str, *, turn: int | None = None, of_step: bool = False) -> None:
        """Go back to ``until``; ``event`` takes that time."""
        until = max(until, self._begin)
        if until >= self._cursor:
            return
        if self._cursor - until < SHORTEST_S and (self._parts or until > self._begin):
            if self._parts:
                self._parts[-1].seconds += self._cursor - until
                self._cursor = self._parts[-1].begin_s = until
            return
        path = EventPath(step=self._step.name, group=self._request.group, event=event)
        if not of_step:
            path.worker, path.request, path.turn = self._request.worker, self._request.request_id, turn
        self._parts.append(PathPart(begin_s=until, seconds=self._cursor - until, path=path))
        self._cursor = until


def _by_last_end(events: Sequence[Event], cursor: float) -> list[Event]:
    """The chain of events backwards from ``cursor``: each ended last before the following one began."""
    found = []
    for event in sorted(events, key=lambda each: (min(each.end_s, cursor), -each.begin_s), reverse=True):
        if event.begin_s < cursor - SHORTEST_S and event.end_s > event.begin_s:
            found.append(event)
            cursor = event.begin_s
    return found


def _beyond_next(step: ProfileStep, wait: ReadTimes, begin: float, end: float) -> list[float]:
    """How much earlier the wait would have ended without the group that was ready last."""
    moments = [step.ready_s[group] for group in wait.groups if group in step.ready_s]
    if not moments:
        moments = [request.end_s for request in step.requests if request.ending == "finished"]
    moments = sorted(min(max(moment, begin), end) for moment in moments)
    return [moments[-1] - moments[-2]] if len(moments) > 1 else []
