"""Builds a request from the attempts of a rollout: its leaves, phases and turns.

A span's own time, in which none of its children was open, counts as a leaf. So does unmeasured time, which is named
by the rule in ``exclusive_time.py``. If several processes recorded spans, phases are counted again from all spans.
Otherwise, or if the spans were not kept, the phases of the summary are used.
"""

from collections.abc import Sequence
from operator import attrgetter, itemgetter

from forebay.telemetry.analysis.intervals import gaps
from forebay.telemetry.analysis.timeline import NS, SURPLUS, Event, FailedAttempt, Request, TurnTimes
from forebay.telemetry.attempts import Attempt, Writer
from forebay.telemetry.tracing.attempt_trace import turn_fields
from forebay.telemetry.tracing.exclusive_time import (
    CONTAINERS,
    ENDINGS,
    Interval,
    TurnInterval,
    rollout_pieces,
    rollout_shares,
)
from forebay.telemetry.tracing.records import Open, Span, TurnSummary

_ENDINGS = ("finished", "failed", *SURPLUS)
_FAILURES = ("failed", "retried", "lost")
_BY_TOOLS = ("environment_failure", "agent_failure")
_HARMLESS = ("", "ToolError")
"""Errors of tools that end no rollout: the model is told what is wrong."""
_BETWEEN_ATTEMPTS = "retry"
_MEASURED = "measured"

_Leaf = tuple[int, int, Span | Open, str]
"""Begin and end of a span that is not a container, clipped to its attempt; the span; and the id of its nearest
enclosing span that is not a container. A plain tuple, for speed."""

_by_begin = itemgetter(0)
_by_moment = attrgetter("begin_s")


def request_of(attempts: list[Attempt]) -> Request:
    """The request made of ``attempts``, which are in order."""
    first, last = attempts[0], attempts[-1]
    end = max(attempt.end for attempt in attempts)
    request = Request(first.uid, "", first.begin * NS, end * NS, group=first.group, num_attempts=len(attempts))
    until = first.begin
    for attempt in attempts:
        if attempt.begin > until:  # the pause before a retry
            _add_phases(request, {_BETWEEN_ATTEMPTS: (attempt.begin - until) * NS})
            request.events.append(Event(_BETWEEN_ATTEMPTS, until * NS, attempt.begin * NS))
        _add_attempt(request, attempt)
        _add_lost_work(request, attempt, is_last=attempt is last)
        until = max(until, attempt.end)
    for number, turn in enumerate(request.turns):
        turn.number = number
    _fit(request)
    if (summary := last.summary) is not None:
        # The last summary may be ``retried``: then the next attempt was never recorded.
        request.ending = summary.ending if summary.ending in _ENDINGS else "open"
        request.is_capped, request.reward = summary.is_capped, summary.reward
        request.reward_parts = summary.reward_parts
        request.prompt_tokens, request.cached_tokens = summary.prompt, summary.cached
        request.sampled_tokens = summary.sampled
    else:
        request.ending = "open" if last.is_open else "finished"
        request.prompt_tokens = sum(turn.prompt_tokens for turn in request.turns)
        request.cached_tokens = sum(turn.cached_tokens for turn in request.turns)
        request.sampled_tokens = sum(turn.sampled_tokens for turn in request.turns)
    return request


def _add_attempt(request: Request, attempt: Attempt) -> None:
    """Add events, phases and turns: from the spans, if they were kept, and from the summary."""
    summary = attempt.summary
    turns = [_turn_times(turn, number) for number, turn in enumerate(summary.turns)] if summary else []
    phases = _seconds(summary.phases) if summary else {}
    request.worker = request.worker or (summary.engine if summary else "")
    if attempt.spans:
        is_joined = _is_joined(attempt)
        leaves = _leaves(attempt, is_joined=is_joined)
        turns = turns or _turns_of_spans(attempt)
        engines = (str(span.at["engine"]) for _, _, span, _ in leaves if span.at.get("engine"))
        request.worker = request.worker or next(engines, "")
        request.events += sorted(_events(leaves) + _unmeasured(attempt, leaves, turns), key=_by_moment)
        if is_joined or not phases:
            phases = _count_phases(attempt, leaves, turns)
    _add_phases(request, phases if attempt.spans or summary else {"agent": (attempt.end - attempt.begin) * NS})
    request.turns += turns


def _add_phases(request: Request, phases: dict[str, float]) -> None:
    for name, seconds in phases.items():
        request.phases[name] = request.phases.get(name, 0.0) + seconds


def _fit(request: Request) -> None:
    """Scale phases to the request's duration if attempts overlap, as copies of one rollout do."""
    total = sum(request.phases.values())
    if request.num_attempts > 1 and total > request.duration_s * 1.001 and total > 0:
        scale = request.duration_s / total
        request.phases = {name: seconds * scale for name, seconds in request.phases.items()}


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


def _turn_times(turn: TurnSummary, number: int) -> TurnTimes:
    """A turn as recorded in a summary."""
    return TurnTimes(
        number,
        turn.t * NS,
        (turn.t + turn.d) * NS,
        _seconds(turn.phases),
        turn.engine,
        turn.prompt,
        turn.cached,
        turn.sampled,
        turn.finish_reason,
        turn.has_tools,
        tuple(turn.tools),
        turn.engine_ns * NS if turn.engine_ns else None,
    )


def _seconds(phases: dict[str, int]) -> dict[str, float]:
    return {name: ns * NS for name, ns in phases.items()}


def _is_joined(attempt: Attempt) -> bool:
    """Whether another process measured parts of it that its summary cannot include."""
    own = attempt.writer
    return any(
        writer is not own and (writer.pid != own.pid or writer.process != own.process) for writer, _ in attempt.spans
    )


def _leaves(attempt: Attempt, *, is_joined: bool) -> list[_Leaf]:
    """The leaves, ordered by begin."""
    containers = {span.id: span.up for _, span in attempt.spans if span.name in CONTAINERS}
    first, last = attempt.begin, attempt.end
    found = []
    for writer, span in attempt.spans:
        if span.name in CONTAINERS:
            continue
        begin = span.t
        end = begin + span.d if isinstance(span, Span) else _end_of_open(attempt, writer, begin)
        begin, end = max(begin, first), min(end, last)
        up = span.up
        for _ in containers:  # a bound on the nesting, which a damaged file might make endless
            if up not in containers:
                break
            up = containers[up]
        found.append((begin, max(begin, end), span, up))
    found.sort(key=_by_begin)
    return _around_turns(attempt, found) if is_joined else found


def _turn_spans(attempt: Attempt) -> list[tuple[int, int, Span | Open]]:
    """Begin and end of each turn's chat, and its span, ordered by begin."""
    turns = [span for _, span in attempt.spans if span.name == "turn"]
    found = [(span.t, span.t + span.d if isinstance(span, Span) else attempt.end, span) for span in turns]
    return sorted(found, key=_by_begin)


def _around_turns(attempt: Attempt, leaves: list[_Leaf]) -> list[_Leaf]:
    """Keep ``environment`` only before the first turn and after the last: the gateway measures the time between."""
    turns = _turn_spans(attempt)
    if not turns:
        return leaves
    first, last = turns[0][0], max(end for _, end, _ in turns)
    found = []
    for leaf in leaves:
        begin, end, span, up = leaf
        if span.name != "environment" or begin > first or end < last:
            found.append(leaf)
        else:
            found += [(begin, first, span, up), (last, end, span, up)]
    found.sort(key=_by_begin)
    return found


def _end_of_open(attempt: Attempt, writer: Writer, begin: int) -> int:
    """The end assumed for a span that never ended. Another process may have died long before the attempt ended."""
    if writer.process == attempt.writer.process:
        return attempt.end
    return max(begin, min(attempt.end, writer.last_ns))


def _turns_of_spans(attempt: Attempt) -> list[TurnTimes]:
    """Turns without a summary: each lasts until the next one begins."""
    spans = _turn_spans(attempt)
    ends = [*(begin for begin, _, _ in spans[1:]), attempt.end]
    turns = []
    for number, ((begin, _, span), end) in enumerate(zip(spans, ends, strict=False)):
        has_tools = bool(span.at.get("has_tools"))
        turn = TurnSummary(t=begin, d=end - begin, has_tools=has_tools, **turn_fields(span.at))
        turns.append(_turn_times(turn, number))
    return turns


def _turn_marks(attempt: Attempt, turns: Sequence[TurnTimes], leaves: Sequence[_Leaf]) -> list[TurnInterval]:
    """The turns, each until its chat ended; the time after that belongs to a tool or the agent."""
    chats = [(begin, end) for begin, end, _ in _turn_spans(attempt)]
    begins = [begin for begin, _ in chats]
    # The summary may time turns by the clock of another process, which differs slightly from the clock of their spans.
    if attempt.summary is not None and len(chats) != len(turns):
        begins = [turn.t for turn in attempt.summary.turns]
    chats = chats or [(begin, end) for begin, end, span, _ in leaves if span.name == "engine"]
    marks = []
    for number, (begin, until) in enumerate(zip(begins, [*begins[1:], attempt.end], strict=False)):
        end = max((chat_end for chat_begin, chat_end in chats if begin <= chat_begin < until), default=begin)
        marks.append(TurnInterval(number, begin, min(end, until), turns[number].has_tools))
    return marks


def _events(leaves: Sequence[_Leaf]) -> list[Event]:
    """The time that each span had to itself."""
    children: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        if leaf[3]:
            children.setdefault(leaf[3], []).append(leaf)
    events = []
    for begin, end, span, _ in leaves:
        is_open = span.__class__ is Open
        for left, right in gaps(begin, end, children.get(span.id, ())):
            events.append(Event(span.name, left * NS, right * NS, span.turn, is_open, span.at))
    return events


def _unmeasured(attempt: Attempt, leaves: Sequence[_Leaf], turns: Sequence[TurnTimes]) -> list[Event]:
    """Unmeasured time, named by the rule in ``exclusive_time.py``."""
    unmeasured = gaps(attempt.begin, attempt.end, leaves)
    if not unmeasured:
        return []
    # All measured time counts as one span, except the spans that end the last tool.
    bounds = [attempt.begin, *(moment for gap in unmeasured for moment in gap), attempt.end]
    measured = [Interval(_MEASURED, begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]
    measured += [Interval(span.name, begin, end) for begin, end, span, _ in leaves if span.name in ENDINGS]
    marks = _turn_marks(attempt, turns, leaves)
    events: list[Event] = []
    for begin, end, names, turn in rollout_pieces(measured, marks, attempt.begin, attempt.end):
        if _MEASURED not in names and names[0] not in ENDINGS:
            events.append(Event(names[0], begin * NS, end * NS, turn))
    return events


def _count_phases(attempt: Attempt, leaves: Sequence[_Leaf], turns: Sequence[TurnTimes]) -> dict[str, float]:
    """Exclusive seconds by phase, from all spans. Also sets the phases of ``turns``."""
    intervals = [Interval(span.name, begin, end, span.id, up) for begin, end, span, up in leaves]
    shares = rollout_shares(intervals, _turn_marks(attempt, turns, leaves), attempt.begin, attempt.end)
    for turn in turns:
        turn.phases = {name: share * NS for name, share in shares.get(turn.number, {}).items()}
    phases: dict[str, float] = {}
    for own in shares.values():
        for name, share in own.items():
            phases[name] = phases.get(name, 0.0) + share * NS
    return phases
