"""Trace spans of engine calls: one per turn, one per HTTP call in the turn, and the engine's phases of the call."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forebay.core.addresses import without_login
from forebay.engines.capture.engine_times import laid_back, longest
from forebay.engines.capture.turn import Turn
from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.spans import SpanHandle

AskLoad = Callable[[SpanHandle], Mapping[str, Any] | None]
"""The ``on_open`` callback of a span: returns the engine's current load."""

MAX_TOOLS = 8
"""Limit for the names of called tools that a turn records, and for the characters of each."""
MAX_NAME = 64


class CallSpan:
    """Span of one HTTP call to an engine, from before it is sent until its reply (or stream) is complete."""

    def __init__(
        self, trace: AttemptTrace, turn: SpanHandle | str | None, engine_url: str, rid: str, ask: AskLoad | None = None
    ) -> None:
        self._trace = trace
        self._handle = trace.begin("engine", up=turn, engine=without_login(engine_url), rid=rid)
        self._handle.on_open = ask
        self._answered_ns: int | None = None
        self._hold: SpanHandle | None = None
        self._held: list[tuple[int, int]] = []

    @property
    def traceparent(self) -> str:
        """Header value that makes the engine's own spans children of this one; empty without tracing."""
        return self._handle.traceparent

    def note_answer(self) -> None:
        """Record that the reply arrived, before it is read."""
        self._answered_ns = self._trace.now()

    def note_paused(self, is_paused: bool) -> None:
        """Record that the engine was paused or resumed. The pause becomes a ``hold`` span, outside the phases."""
        if is_paused and self._hold is None and self._handle.is_open:
            self._hold = self._trace.begin("hold", up=self._handle)
        elif not is_paused and self._hold is not None:
            self._end_hold(self._trace.now())

    @contextmanager
    def failing(self) -> Iterator[None]:
        """End the span if an error is raised, recording the error's type but never its text."""
        try:
            yield
        except BaseException as error:
            self.end(error=type(error).__name__)
            raise

    def end(self, turns: Iterable[Turn] = (), **at: Any) -> None:
        """End the span with the resulting ``turns``. Only the first call has an effect."""
        handle = self._handle
        if not handle.is_open:
            return
        choices = list(turns)
        end_ns = self._answered_ns or self._trace.now()
        self._end_hold(end_ns)
        times = longest(turn.engine for turn in choices)
        for phase, begin_ns, duration_ns in laid_back(times, handle.begun, end_ns):
            for begin, end in _without(self._held, begin_ns, begin_ns + duration_ns):
                self._trace.add(phase, begin, end - begin, up=handle)
        handle.end(end_ns, **_counts(choices, times), **at)

    def _end_hold(self, at_ns: int) -> None:
        if self._hold is not None:
            self._held.append((self._hold.begun, at_ns))
            self._hold.end(at_ns)
            self._hold = None


@contextmanager
def ended(span: SpanHandle) -> Iterator[None]:
    """End ``span`` on exit, without making it the current span."""
    try:
        yield
    finally:
        span.end()


def end_turn(turn: SpanHandle, choices: Iterable[Turn], **at: Any) -> None:
    """End the span of a turn with these choices."""
    choices = list(choices)
    called = {name for choice in choices for name in _names(choice.reply.get("tool_calls"))}
    # Only tools of the request, in its order: any other name is text of the reply.
    tools = dict.fromkeys(name[:MAX_NAME] for choice in choices for name in _names(choice.tools) if name in called)
    if tools:
        at["tools"] = list(tools)[:MAX_TOOLS]
    turn.end(has_tools=any(choice.reply.get("tool_calls") for choice in choices), **at)


def _names(tools: object) -> Iterator[str]:
    """Names in the ``tools`` of a request or the ``tool_calls`` of a reply, which may have any shape."""
    for each in tools if isinstance(tools, list) else ():
        function = each.get("function") if isinstance(each, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            yield name


def num_sampled(turn: Turn) -> int:
    """Number of sampled tokens of one choice."""
    if turn.sampled_ids is not None:
        return len(turn.sampled_ids)
    # The engine reports one count for all choices of a call: it is attributed to the first choice.
    number = turn.usage.get("completion_tokens")
    return number if isinstance(number, int) and turn.choice == 0 else 0


def versions_of(choices: Iterable[Turn]) -> list[str]:
    """Weight versions that the choices were sampled with, without duplicates."""
    return list(dict.fromkeys(version for choice in choices for version in _versions(choice)))


def _versions(turn: Turn) -> list[str]:
    return [span.version for span in turn.versions] or turn.seen_versions


def _counts(choices: list[Turn], times: Mapping[str, float]) -> dict[str, Any]:
    if not choices:
        return {}
    first, cached = choices[0], times.get("cached_tokens")
    known = {
        "prompt": len(first.prompt_ids) if first.prompt_ids is not None else first.usage.get("prompt_tokens"),
        "cached": None if cached is None else int(cached),
        "sampled": sum(map(num_sampled, choices)),
        "finish_reason": first.finish_reason,
        "versions": versions_of(choices),
        "total_s": times.get("total_s"),
    }
    return {name: value for name, value in known.items() if value not in (None, "", [])}


def _without(held: list[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[begin, end)`` outside the intervals in ``held``, which are in order."""
    for held_begin, held_end in held:
        if begin < held_begin < end:
            yield begin, held_begin
        if held_begin < end:
            begin = max(begin, held_end)
    if begin < end:
        yield begin, end
