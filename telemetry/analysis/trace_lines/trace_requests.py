"""From the lines of groups to their requests: the attempts of each rollout, with what every process measured of them.

What the gateway measured stands below the run's attempt: by the ids of spans where they lead there, else by the
attempt's number, else by its time. Where more than one process measured, phases are counted anew from all spans; else
those of the summary are taken, as they are where its spans were not kept.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay.telemetry.analysis.timeline import SURPLUS, Event, Request
from forebay.telemetry.analysis.trace_lines.span_events import AttemptSpans, EventsOfAttempt, events_of
from forebay.telemetry.analysis.trace_lines.trace_index import NS
from forebay.telemetry.analysis.trace_lines.trace_sources import Writer
from forebay.telemetry.tracing.records import Open, Record, RolloutSummary, Span

_ENDINGS = ("finished", "failed", *SURPLUS)
_BETWEEN_ATTEMPTS = "retry"
_CLOCKS_APART_NS = 10_000_000
"""So much earlier than its attempt a call may seem to begin that another process noted."""


@dataclass(slots=True)
class _RolloutLines:
    """What was written of one rollout, each span and summary once."""

    group: str = ""
    summaries: dict[str, tuple[Writer, RolloutSummary]] = field(default_factory=dict)
    spans: dict[str, tuple[Writer, Span | Open]] = field(default_factory=dict)


def requests_of(records: Iterable[tuple[Writer, Record]], last_ns: int) -> Iterator[Request]:
    """The requests that these lines tell of. ``last_ns`` is when the log ended."""
    rollouts: dict[str, _RolloutLines] = {}
    for writer, record in records:
        if record.__class__ is Span or record.__class__ is Open or record.__class__ is RolloutSummary:
            lines = rollouts.get(record.uid)
            if lines is None:
                lines = rollouts[record.uid] = _RolloutLines()
            _sort_in(lines, writer, record)
    for uid, lines in rollouts.items():
        yield _request_of(uid, lines, last_ns)


def _sort_in(lines: _RolloutLines, writer: Writer, record: Any) -> None:
    lines.group = lines.group or record.group
    if record.__class__ is RolloutSummary:
        lines.summaries[record.id] = writer, record
    elif record.__class__ is Span or record.id not in lines.spans:
        lines.spans[record.id] = writer, record


def _request_of(uid: str, lines: _RolloutLines, last_ns: int) -> Request:
    attempts = sorted(_attempts_of(lines, last_ns), key=lambda each: each.begin)
    made = [events_of(attempt) for attempt in attempts]
    first, last = attempts[0], attempts[-1]
    request = Request(
        uid,
        next((each.worker for each in made if each.worker), ""),
        first.begin * NS,
        max(attempt.end for attempt in attempts) * NS,
        group=lines.group,
        num_attempts=len(attempts),
        ending="open" if last.is_open else "finished",
    )
    _add_attempts(request, attempts, made)
    if last.summary is not None:
        _add_summary(request, last.summary)
    else:
        _add_counts(request)
    for attempt in attempts[:-1]:
        _add_broken(request, attempt.summary)
    return request


def _add_attempts(request: Request, attempts: list[AttemptSpans], made: list[EventsOfAttempt]) -> None:
    """Their phases, events and turns one after the other. What lies between two is the pause before another try."""
    until = attempts[0].begin
    for attempt, each in zip(attempts, made, strict=True):
        between = (attempt.begin - until) * NS
        if between > 0:
            each.phases[_BETWEEN_ATTEMPTS] = each.phases.get(_BETWEEN_ATTEMPTS, 0.0) + between
            request.events.append(Event(_BETWEEN_ATTEMPTS, until * NS, attempt.begin * NS))
        for name, seconds in each.phases.items():
            request.phases[name] = request.phases.get(name, 0.0) + seconds
        request.events += each.events
        request.turns += each.turns
        until = max(until, attempt.end)
    for number, turn in enumerate(request.turns):
        turn.number = number
    _fit(request)


def _fit(request: Request) -> None:
    """Phases add up to the request where attempts lie over each other, as copies of one rollout do."""
    total = sum(request.phases.values())
    if total > request.duration_s * 1.001 and total > 0:
        scale = request.duration_s / total
        request.phases = {name: seconds * scale for name, seconds in request.phases.items()}


def _add_summary(request: Request, summary: RolloutSummary) -> None:
    # ``retried`` as the last word: the other try never came.
    request.ending = summary.ending if summary.ending in _ENDINGS else "open"
    request.outcome = summary.outcome
    request.is_capped = summary.is_capped
    request.reward, request.reward_cpu_s = summary.reward, summary.reward_cpu_s
    request.prompt_tokens, request.cached_tokens = summary.prompt, summary.cached
    request.sampled_tokens = summary.sampled


def _add_broken(request: Request, summary: RolloutSummary | None) -> None:
    if summary is not None and summary.ending == "broken":
        request.num_broken += 1
        request.broken_s += summary.d * NS
        request.broken_tokens += summary.sampled


def _add_counts(request: Request) -> None:
    for turn in request.turns:
        request.prompt_tokens += turn.prompt_tokens
        request.cached_tokens += turn.cached_tokens
        request.sampled_tokens += turn.sampled_tokens


def _attempts_of(lines: _RolloutLines, last_ns: int) -> list[AttemptSpans]:
    attempts = {name: _ended_attempt(writer, summary) for name, (writer, summary) in lines.summaries.items()}
    if len(attempts) == 1:
        (only,) = attempts.values()
        if _is_all_of(only, lines):
            return [only]
    _Sorting(lines, attempts, last_ns).go()
    return list(attempts.values())


def _ended_attempt(writer: Writer, summary: RolloutSummary) -> AttemptSpans:
    begin = summary.t + writer.shift_ns
    return AttemptSpans(summary.id, writer, summary, begin, begin + summary.d, number=summary.attempt)


def _is_all_of(only: AttemptSpans, lines: _RolloutLines) -> bool:
    """Give all spans to the one attempt that has a summary; False if some are of another, which began before."""
    for name, (writer, span) in lines.spans.items():
        if name == only.id:
            continue
        if span.t + writer.shift_ns < only.begin - _CLOCKS_APART_NS or span.name == "attempt":
            only.spans.clear()
            return False
        only.spans.append((writer, span))
    return True


class _Sorting:
    """Which span belongs to which attempt, where there are several, or one of which there is no summary."""

    def __init__(self, lines: _RolloutLines, attempts: dict[str, AttemptSpans], last_ns: int) -> None:
        self._lines = lines
        self._attempts = attempts
        self._last_ns = last_ns
        self._of_numbers: dict[int, list[AttemptSpans]] = {}

    def go(self) -> None:
        self._add_unsummarised()
        for attempt in self._attempts.values():
            self._of_numbers.setdefault(attempt.number, []).append(attempt)
        for name, (writer, span) in self._lines.spans.items():
            if name not in self._attempts:
                self._attempt_of(writer, span).spans.append((writer, span))
        for attempt in self._attempts.values():
            self._close(attempt)

    def _add_unsummarised(self) -> None:
        """Attempts whose process was killed, or goes on: of the first ten seconds nothing but ended spans is known."""
        for name, (writer, span) in self._lines.spans.items():
            if span.name == "attempt" and name not in self._attempts:
                self._attempts[name] = self._open_attempt(name, writer, span)
        for name, (writer, span) in list(self._lines.spans.items()):
            root = self._root(span)
            if name not in self._attempts and root not in self._attempts and (root or not self._attempts):
                if self._lies_within(writer, span):
                    continue  # its parent is an agent's, which is not written here, or was lost
                self._attempts[root] = self._open_attempt(root, writer, span)

    def _lies_within(self, writer: Writer, span: Span | Open) -> bool:
        moment = span.t + writer.shift_ns
        ended = (each for each in self._attempts.values() if not each.is_open)
        return any(each.begin - _CLOCKS_APART_NS <= moment <= each.end for each in ended)

    def _open_attempt(self, name: str, writer: Writer, span: Span | Open) -> AttemptSpans:
        begin = span.t + writer.shift_ns
        attempt = AttemptSpans(name, writer, None, begin, begin, number=span.attempt, is_open=True)
        if span.name == "attempt" and isinstance(span, Span):
            attempt.end, attempt.is_open = begin + span.d, False
        return attempt

    def _root(self, span: Span | Open) -> str:
        up = span.up
        for _ in range(64):
            above = self._lines.spans.get(up)
            if up in self._attempts or above is None:
                break
            up = above[1].up or up
        return up

    def _attempt_of(self, writer: Writer, span: Span | Open) -> AttemptSpans:
        known = self._attempts.get(self._root(span))
        if known is not None:
            return known
        same = self._of_numbers.get(span.attempt) or list(self._attempts.values())
        moment = span.t + writer.shift_ns
        return max((each for each in same if each.begin <= moment), key=lambda each: each.begin, default=same[0])

    def _close(self, attempt: AttemptSpans) -> None:
        """An attempt without an end lasted until its process's last sign of life, or until the next one began.

        Without a next one: until its process ended, or the log did.
        """
        if attempt.summary is not None:
            return
        begins = [span.t + writer.shift_ns for writer, span in attempt.spans]
        attempt.begin = min([attempt.begin, *begins])
        if not attempt.is_open:
            return
        ends = [span.t + span.d + writer.shift_ns for writer, span in attempt.spans if isinstance(span, Span)]
        later = [each.begin for each in self._attempts.values() if each.begin > attempt.begin]
        died = attempt.writer.ended_ns or self._last_ns
        attempt.end = max([attempt.writer.last_ns if later else died, *ends, *begins])
        attempt.end = max(min([attempt.end, *later]), attempt.begin)
