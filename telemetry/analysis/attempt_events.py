"""The spans of one attempt as leaves, phases and turns.

A span's own time, in which none of its children was open, counts as a leaf. So does unmeasured time, which is named
by the rule in ``exclusive_time.py``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from forebay.telemetry.analysis.intervals import gaps
from forebay.telemetry.analysis.timeline import NS, Event, TurnTimes
from forebay.telemetry.attempts import Attempt, Writer
from forebay.telemetry.tracing.exclusive_time import (
    CONTAINERS,
    ENDINGS,
    Interval,
    TurnInterval,
    rollout_pieces,
    rollout_shares,
)
from forebay.telemetry.tracing.records import Open, Span, TurnSummary


@dataclass(slots=True)
class EventsOfAttempt:
    """The timeline's data about an attempt, in seconds."""

    worker: str
    phases: dict[str, float]
    events: list[Event]
    turns: list[TurnTimes]


_Leaf = tuple[int, int, Span | Open, str]
"""Begin and end of a span that is not a container, clipped to its attempt; the span; and the id of its nearest
enclosing span that is not a container. A plain tuple, for speed."""

_ENVIRONMENT = "environment"

_by_begin = itemgetter(0)
_by_moment = attrgetter("begin_s")


def events_of(attempt: Attempt) -> EventsOfAttempt:
    """Everything about one attempt: from its spans, if they were kept, and from its summary."""
    summary = attempt.summary
    turns = [_turn_times(turn, number) for number, turn in enumerate(summary.turns)] if summary else []
    worker = summary.engine if summary else ""
    if not attempt.spans:
        phases = _seconds(summary.phases) if summary else {"agent": (attempt.end - attempt.begin) * NS}
        return EventsOfAttempt(worker, phases, [], turns)
    leaves = _leaves(attempt)
    turns = turns or list(_turns_of_spans(attempt))
    events = _events(leaves)
    events += _unmeasured(attempt, leaves, turns)
    events.sort(key=_by_moment)
    if summary is None or not summary.phases or _is_joined(attempt):
        phases = _count_phases(attempt, leaves, turns)
    else:
        phases = _seconds(summary.phases)
    return EventsOfAttempt(worker or _first_engine(leaves), phases, events, turns)


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


def _leaves(attempt: Attempt) -> list[_Leaf]:
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
    return _around_turns(attempt, found) if _is_joined(attempt) else found


def _around_turns(attempt: Attempt, leaves: list[_Leaf]) -> list[_Leaf]:
    """Keep ``environment`` only before the first turn and after the last: the gateway measures the time between."""
    turns = [(span.t, span) for _, span in attempt.spans if span.name == "turn"]
    if not turns:
        return leaves
    first = min(begin for begin, _ in turns)
    last = max(begin + span.d if isinstance(span, Span) else attempt.end for begin, span in turns)
    found = []
    for leaf in leaves:
        begin, end, span, up = leaf
        if span.name != _ENVIRONMENT or begin > first or end < last:
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


def _turns_of_spans(attempt: Attempt) -> Iterator[TurnTimes]:
    """Turns without a summary: each lasts until the next one begins."""
    found = [(span.t, span) for _, span in attempt.spans if span.name == "turn"]
    found.sort(key=_by_begin)
    for number, (begin, span) in enumerate(found):
        end = found[number + 1][0] if number + 1 < len(found) else attempt.end
        at = span.at
        yield TurnTimes(
            number,
            begin * NS,
            end * NS,
            engine=str(at.get("engine") or ""),
            prompt_tokens=int(at.get("prompt") or 0),
            cached_tokens=int(at.get("cached") or 0),
            sampled_tokens=int(at.get("sampled") or 0),
            finish_reason=str(at.get("finish_reason") or ""),
            has_tools=bool(at.get("has_tools")),
        )


def _turn_marks(attempt: Attempt, turns: Sequence[TurnTimes], leaves: Sequence[_Leaf]) -> list[TurnInterval]:
    """The turns, each until its chat ended; the time after that belongs to a tool or the agent."""
    chats: list[tuple[int, int]] = []
    for _, span in attempt.spans:
        if span.name == "turn":
            begin = span.t
            chats.append((begin, begin + span.d if isinstance(span, Span) else attempt.end))
    # The summary may time turns by the clock of another process, which differs slightly from the clock of their spans.
    if attempt.summary is not None and len(chats) != len(turns):
        begins = [turn.t for turn in attempt.summary.turns]
    else:
        begins = sorted(begin for begin, _ in chats)
    if not chats:
        chats = [(begin, end) for begin, end, span, _ in leaves if span.name == "engine"]
    marks = []
    for number, begin in enumerate(begins):
        until = begins[number + 1] if number + 1 < len(begins) else attempt.end
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
        inner = children.get(span.id)
        is_open = span.__class__ is Open
        if inner is None:
            if end > begin:
                events.append(Event(span.name, begin * NS, end * NS, span.turn, is_open, span.at))
        else:
            for left, right in gaps(begin, end, inner):
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


_MEASURED = "measured"


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


def _first_engine(leaves: Sequence[_Leaf]) -> str:
    return next((str(span.at["engine"]) for _, _, span, _ in leaves if span.at.get("engine")), "")
