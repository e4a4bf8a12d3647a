"""The time that an engine usually needs for a number of tokens. A slower call has a reason other than its length.

Only comparable calls are compared: a first turn has a long prompt and ends in a tool call, a last one is prose. Each
turn that most requests have gets a line of its own, with fixed seconds and seconds per token, over all engines. Each
engine has a factor relative to it. If the engine reports its decode time, only that time is taken to depend on tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forebay.telemetry.analysis.robust import median, resistant_line
from forebay.telemetry.analysis.timeline import Request

WORKING = ("engine", "prefill", "decode")
"""Phases in which an engine works on a call; its queue is a separate cause."""
_MIN_CALLS = 6
"""With fewer calls, a turn or engine has no rate of its own; the rate over all calls is used."""
_HALF = 0.5


def working_s(phases: dict[str, float]) -> float:
    """Seconds that engines worked, given exclusive seconds by phase."""
    return sum(phases.get(name, 0.0) for name in WORKING)


class _Call(NamedTuple):
    engine: str
    turn: int
    tokens: int
    seconds: float
    decode_s: float | None


class _Line(NamedTuple):
    base_s: float = 0.0
    s_per_token: float = 0.0

    def at(self, tokens: int) -> float:
        return self.base_s + self.s_per_token * tokens


class EngineRates:
    """Seconds by tokens for each turn and engine of one step."""

    def __init__(self, requests: Iterable[Request]) -> None:
        by_turn: dict[int, list[_Call]] = defaultdict(list)
        num_requests = 0
        for request in requests:
            num_requests += 1
            for call in _calls(request):
                if call.seconds > 0:
                    by_turn[call.turn].append(call)
        calls = [call for own in by_turn.values() for call in own]
        self.knows_tokens = any(call.tokens for call in calls)
        self._all = _line(calls)
        usual = max(_MIN_CALLS, _HALF * num_requests)
        self._lines = {turn: _line(own) for turn, own in by_turn.items() if len(own) >= usual}
        self._times = self._by_engine(calls)

    def _by_engine(self, calls: Sequence[_Call]) -> dict[str, float]:
        """Each engine's factor: how many times as long as usual it takes."""
        ratios: dict[str, list[float]] = defaultdict(list)
        for call in calls:
            usual_s = self._usual_s(call)
            if usual_s > 0:
                ratios[call.engine].append(call.seconds / usual_s)
        return {engine: median(own) for engine, own in ratios.items() if len(own) >= _MIN_CALLS}

    def _usual_s(self, call: _Call) -> float:
        return self._lines.get(call.turn, self._all).at(call.tokens)

    def expected_s(self, request: Request) -> list[float]:
        """Expected seconds for each turn; for a request without turns, one value for all its tokens."""
        return [self._usual_s(call) * self._times.get(call.engine, 1.0) for call in _calls(request)]

    def tokens_per_s(self, engine: str) -> float | None:
        """The speed of ``engine`` for one request; None if tokens are not recorded."""
        s_per_token = self._all.s_per_token * self._times.get(engine, 1.0)
        return 1 / s_per_token if s_per_token > 0 else None


def _line(calls: Sequence[_Call]) -> _Line:
    with_tokens = [call for call in calls if call.tokens]
    if not with_tokens:
        return _Line(median([call.seconds for call in calls]))
    decoding = [call.decode_s / call.tokens for call in with_tokens if call.decode_s is not None]
    if len(decoding) < _HALF * len(with_tokens):
        return _Line(*resistant_line([(float(call.tokens), call.seconds) for call in with_tokens]))
    s_per_token = median(decoding)
    base_s = median([call.seconds - s_per_token * call.tokens for call in with_tokens])
    return _Line(max(0.0, base_s), s_per_token)


def _calls(request: Request) -> list[_Call]:
    """One call for each turn."""
    if not request.turns:
        phases = request.phases
        return [_Call(request.worker, 0, request.sampled_tokens, working_s(phases), phases.get("decode"))]
    return [
        _Call(
            turn.engine or request.worker,
            turn.number,
            turn.sampled_tokens,
            working_s(turn.phases),
            turn.phases.get("decode"),
        )
        for turn in request.turns
    ]
