"""Builds a request from the attempts of a rollout.

If several processes recorded spans, phases are counted again from all spans. Otherwise, or if the spans were not kept,
the phases of the summary are used.
"""

from forebay.telemetry.analysis.attempt_events import EventsOfAttempt, events_of
from forebay.telemetry.analysis.timeline import NS, SURPLUS, Event, FailedAttempt, Request
from forebay.telemetry.attempts import Attempt
from forebay.telemetry.tracing.records import RolloutSummary, Span

_ENDINGS = ("finished", "failed", *SURPLUS)
_FAILURES = ("failed", "retried", "lost")
_BY_TOOLS = ("environment_failure", "agent_failure")
_HARMLESS = ("", "ToolError")
"""Errors of tools that end no rollout: the model is told what is wrong."""
_BETWEEN_ATTEMPTS = "retry"


def request_of(attempts: list[Attempt]) -> Request:
    """The request made of ``attempts``, which are in order."""
    made = [events_of(attempt) for attempt in attempts]
    first, last = attempts[0], attempts[-1]
    request = Request(
        first.uid,
        next((each.worker for each in made if each.worker), ""),
        first.begin * NS,
        max(attempt.end for attempt in attempts) * NS,
        group=first.group,
        num_attempts=len(attempts),
        ending="open" if last.is_open else "finished",
    )
    _add_attempts(request, attempts, made)
    if last.summary is not None:
        _add_summary(request, last.summary)
    else:
        request.prompt_tokens = sum(turn.prompt_tokens for turn in request.turns)
        request.cached_tokens = sum(turn.cached_tokens for turn in request.turns)
        request.sampled_tokens = sum(turn.sampled_tokens for turn in request.turns)
    for attempt in attempts:
        _add_lost_work(request, attempt, is_last=attempt is last)
    return request


def _add_attempts(request: Request, attempts: list[Attempt], made: list[EventsOfAttempt]) -> None:
    """Join phases, events and turns of the attempts. Time between two attempts is the pause before the retry."""
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
    """Scale phases to the request's duration if attempts overlap, as copies of one rollout do."""
    total = sum(request.phases.values())
    if request.num_attempts > 1 and total > request.duration_s * 1.001 and total > 0:
        scale = request.duration_s / total
        request.phases = {name: seconds * scale for name, seconds in request.phases.items()}


def _add_summary(request: Request, summary: RolloutSummary) -> None:
    # The last summary is ``retried``, so the next attempt was never recorded.
    request.ending = summary.ending if summary.ending in _ENDINGS else "open"
    request.is_capped = summary.is_capped
    request.reward = summary.reward
    request.prompt_tokens, request.cached_tokens = summary.prompt, summary.cached
    request.sampled_tokens = summary.sampled


def _add_lost_work(request: Request, attempt: Attempt, *, is_last: bool) -> None:
    summary = attempt.summary
    if summary is None:
        return
    if summary.ending in _FAILURES:
        kind = summary.outcome or summary.ending
        tool = _failed_tool(attempt) if kind in _BY_TOOLS else ""
        request.failed.append(FailedAttempt(kind, attempt.begin * NS, attempt.end * NS, summary.sampled, tool))
    elif summary.ending == "broken" and not is_last:
        request.num_broken += 1
        request.broken_s += summary.d * NS
        request.broken_tokens += summary.sampled


def _failed_tool(attempt: Attempt) -> str:
    """The name of the last tool, if it raised an error. That error cancels the tools running beside it."""
    tools = [span for _, span in attempt.spans if isinstance(span, Span) and span.name == "tool"]
    tools = [span for span in tools if span.at.get("error") != "CancelledError"]
    last = max(tools, key=lambda span: span.t + span.d, default=None)
    return str(last.at.get("tool") or "") if last and last.at.get("error", "") not in _HARMLESS else ""
