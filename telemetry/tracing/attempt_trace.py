"""The spans of one attempt of a rollout, and its totals: phases, turns and summary."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import Any, NamedTuple

from forebay.telemetry.tracing.exclusive_time import PlainInterval, TurnInterval, rollout_shares
from forebay.telemetry.tracing.records import RolloutSummary, Span, TurnSummary
from forebay.telemetry.tracing.spans import Recorder, Scope, SpanHandle, current_span
from forebay.telemetry.tracing.trace_ids import new_span_id

CAPPED = "length"
"""The finish reason of a call that reached its token limit."""


class _Turn(NamedTuple):
    """A turn. Its attributes are those of its span, which may still get more."""

    id: str
    number: int
    begun: int
    at: dict[str, Any]


def counts_of(turns: Sequence[TurnSummary]) -> dict[str, Any]:
    """The fields of a rollout's summary that are computed from its turns."""
    return {
        "turns": list(turns),
        "engine": next((turn.engine for turn in turns if turn.engine), ""),
        "prompt": sum(turn.prompt for turn in turns),
        "cached": sum(turn.cached for turn in turns),
        "sampled": sum(turn.sampled for turn in turns),
        "is_capped": any(turn.finish_reason == CAPPED for turn in turns),
    }


class AttemptTrace(Scope):
    """One attempt. Spans are written when they end, if the group's are kept. Their times are always collected."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        uid: str,
        group: str,
        attempt: int,
        begun: int | None = None,
        id: str = "",  # noqa: A002 - the name of the record's field
        is_kept: bool = True,
    ) -> None:
        self.id = id or new_span_id()
        super().__init__(recorder, uid=uid, group=group, attempt=attempt, up=self.id, is_kept=is_kept)
        self.begun = begun or recorder.now()
        self._collected: list[PlainInterval] = []
        self._intervals = self._collected
        self._turns: list[_Turn] = []
        self._summary: RolloutSummary | None = None
        if not id:  # otherwise another process opened it and writes it
            self._open[self.id] = self._root()

    @property
    def traceparent(self) -> str:
        """The header with which spans of other services become children of this attempt."""
        return self._root().traceparent

    def turn(
        self,
        number: int,
        *,
        begun: int | None = None,
        up: SpanHandle | str | None = None,
        id: str = "",  # noqa: A002 - the name of the record's field
        **at: Any,
    ) -> SpanHandle:
        """The span of one turn, for a ``with``. Spans in its context, and those until the next turn, belong to it.

        The attributes ``engine``, ``prompt``, ``cached``, ``sampled``, ``finish_reason``, ``has_tools``,
        ``tools`` and ``versions`` go into the summary. Missing ones are taken from its ``engine`` spans.
        """
        begun = begun or self._recorder.now()
        handle = self._opened("turn", id or new_span_id(), self._place(up, None)[0], number, begun, at)
        self._turns.append(_Turn(handle.id, number, begun, at))
        self._last_turn = number
        return handle

    def know_as(self, id: str) -> None:  # noqa: A002 - the name of the record's field
        """Use the id assigned by another process. Call this before anything is recorded."""
        root = self._open.pop(self.id, None)
        self.id = self._up = id
        if root is not None:
            root.id = id
            self._open[id] = root

    @contextmanager
    def activate(self) -> Iterator[None]:
        """In this context, ``span()`` and ``traceparent()`` refer to this attempt: in this task or thread."""
        token = current_span.set(self._root())
        try:
            yield
        finally:
            with suppress(ValueError):  # a generator that was closed elsewhere: the context is gone
                current_span.reset(token)

    def phases(self, until: int | None = None) -> dict[str, int]:
        """Exclusive nanoseconds until ``until`` (default: now), including open spans. They add up to the duration."""
        if self._summary is not None:
            return dict(self._summary.phases)
        return self._measured(until or self._recorder.now())[1]

    def take_over(self, span: Span, *, turn: int, up: str) -> None:
        """Adopt a span that was recorded before its attempt was known. It keeps its id."""
        self._opened(span.name, span.id, up, turn, span.t, span.at).end(span.t + span.d)

    def turns(self, until: int | None = None) -> list[TurnSummary]:
        """The turns so far. The last one lasts until ``until``, or by default until the end of the last call."""
        ends = [end for name, _, end, _, _ in self._collected if name == "turn"]
        still_open = any(each.name == "turn" for each in list(self._open.values()))
        end = until or (self._recorder.now() if still_open or not ends else int(max(ends)))
        return self._measured(end)[0]

    def summary(self, *, until: int | None = None, **fields: Any) -> RolloutSummary:
        """End the attempt now or at ``until``, and write its summary. ``fields`` are set by the caller."""
        if self._summary is not None:
            return self._summary
        end = until or self._recorder.now()
        turns, phases = self._measured(end)
        known = {
            "t": self.begun,
            "d": max(end - self.begun, 0),
            "id": self.id,
            "uid": self.uid,
            "group": self.group,
            "instance": "",
            "attempt": self.attempt,
            **counts_of(turns),
            "phases": phases,
            "has_spans": self.is_kept,
        }
        self._summary = RolloutSummary(**{**known, **fields})
        self._intervals = None
        if (root := self._open.get(self.id)) is not None:
            root.end(end, **{name: fields[name] for name in ("ending", "outcome") if fields.get(name)})
        self._recorder.write(self._summary)
        return self._summary

    def _root(self) -> SpanHandle:
        """The span of the whole attempt. Not stored here, which would create a reference cycle."""
        return self._open.get(self.id) or SpanHandle(self, "attempt", self.id, "", None, self.begun, {})

    def _measured(self, end: int) -> tuple[list[TurnSummary], dict[str, int]]:
        """The turns, each until the next one begins, and the exclusive nanoseconds of the attempt, until ``end``."""
        still_open = [(each.name, each.begun, end, each.id, each.up) for each in list(self._open.values())]
        intervals = [*self._collected, *still_open]
        ends = {span_id: until for name, _, until, span_id, _ in intervals if name == "turn"}
        turns = sorted(self._turns, key=itemgetter(2))
        marks = [
            TurnInterval(number, turn.begun, ends.get(turn.id, end), bool(turn.at.get("has_tools")))
            for number, turn in enumerate(turns)
        ]
        shares = rollout_shares(intervals, marks, self.begun, end)
        phases = Counter(_whole(shares.get(None, {})))
        summaries = [self._turn_summary(turn, _whole(shares.get(number, {}))) for number, turn in enumerate(turns)]
        for each in summaries:
            phases.update(each.phases)
        return summaries, dict(phases)

    def _turn_summary(self, turn: _Turn, phases: dict[str, int]) -> TurnSummary:
        calls, lasted = self._calls.get(turn.number, ()), sum(phases.values())
        known = {**_of_calls(calls), **turn_fields(turn.at), "has_tools": bool(turn.at.get("has_tools"))}
        totals = [call["total_s"] for call in calls if isinstance(call.get("total_s"), int | float)]
        if len(totals) == len(calls):
            known["engine_ns"] = min(round(sum(totals) * 1e9), lasted)
        return TurnSummary(t=turn.begun, d=lasted, phases=phases, **known)


_TURN_FIELDS = {
    "engine": str,
    "prompt": int,
    "cached": int,
    "sampled": int,
    "finish_reason": str,
    "tools": list,
    "versions": list,
}


def turn_fields(at: dict[str, Any]) -> dict[str, Any]:
    """The fields of a turn among attributes. A user's span may have others of the same name, but of another type."""
    return {name: at[name] for name, kind in _TURN_FIELDS.items() if isinstance(at.get(name), kind)}


def _of_calls(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is known of a turn from its calls. There are several if it was resumed after an abort."""
    known: dict[str, Any] = {}
    for own in map(turn_fields, calls):
        versions = known.get("versions", [])
        summed = {
            "sampled": known.get("sampled", 0) + own.get("sampled", 0),
            "versions": [*versions, *(each for each in own.get("versions", ()) if each not in versions)],
            "finish_reason": own.get("finish_reason", known.get("finish_reason", "")),
        }
        known = {**own, **known, **summed}
    return known


def _whole(shares: dict[str, float]) -> dict[str, int]:
    """Round to whole nanoseconds with the same sum."""
    whole = {name: int(share) for name, share in shares.items()}
    if whole and (rest := round(sum(shares.values()) - sum(whole.values()))):
        whole[max(whole, key=whole.__getitem__)] += rest
    return whole
