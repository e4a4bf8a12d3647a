"""Compares the engines of a step: what a call needs at the rate that they share, and which of them are slower.

Only comparable calls are compared: a first turn has a long prompt and ends in a tool call, a last one is prose. Each
turn that most requests have gets a line of its own, with fixed seconds and seconds per token. The lines are drawn
through the calls of the fast engines, so a slow engine is compared with the others and not with itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from forebay.telemetry.analysis.intervals import covered_within
from forebay.telemetry.analysis.robust import median, percentile, resistant_line
from forebay.telemetry.analysis.timeline import Request, SharedEngine, TurnTimes

SLOWER = 1.2
"""An engine is slow if its calls take this many times as long as the same calls elsewhere."""
_SLOWER_CALL = 1.1
_MOST = 0.6
"""… and if this share of its work was in calls that took ``_SLOWER_CALL`` times as long."""
_MIN_CALLS = 4
"""With fewer calls, an engine is not judged."""
SHARED = "shared"
"""Stands for all engines while other runs use them."""
_FEW_CALLS = 16
"""With fewer calls in a step, calls of earlier steps are added."""
_MIN_FOR_LINE = 6
_FIXED = 0.7
"""Calls have fixed seconds more if that fits better than a factor, with this share of its scatter."""
_ALIKE, _MOST_SLOW = 0.2, 0.8
"""An engine was silent if slow calls took the same seconds longer, with this scatter, and some were not slow …"""
_TOGETHER = 0.8
"""… if the slow calls were open together for this share of these seconds …"""
_SILENT_SHARE = 0.2
"""… and if these calls are of this share of its requests."""
_TRIMMED = 0.1
"""This share of an engine's calls, the slowest, is left out: a single stall does not make an engine slow."""
_LATE = 1 / 3
"""An engine that slows down is judged by this share of its calls, the last ones."""
_COLDER = 0.2
"""An engine's cache is cold if it finds this share of the prompt tokens less than others do."""
_HALF = 0.5


class WorkCall(NamedTuple):
    """One turn at one engine. None: not reported by the engine."""

    engine: str
    request: str
    turn: int
    begin_s: float
    end_s: float
    tokens: int
    prompt: int
    cached: int
    work_s: float
    """Its time without the engine's queue."""
    queue_s: float
    decode_s: float | None
    prefill_s: float | None
    network_s: float | None
    """The part outside the engine."""


class SlowEngine(NamedTuple):
    """An engine that is slower than the others."""

    cause: str
    """``slow_engine``, ``cold_cache``, ``network``, ``stalled_engine`` (silent once) or ``shared_engines``."""
    part: str
    """What is slower: ``decode``, ``prefill``, ``engine`` (outside the engine), or "" if no times are reported."""
    mine: float
    others: float
    """Median of that part: seconds per token if it is decoding or unknown, else seconds per call."""
    factor: float
    """How many times as long its calls take."""
    beyond_s: float
    """Median seconds of a call beyond what it needs elsewhere."""
    grew: float
    """How many times as long its last calls take as its first ones."""


class _Line(NamedTuple):
    base_s: float = 0.0
    s_per_token: float = 0.0

    def at(self, tokens: int) -> float:
        return self.base_s + self.s_per_token * tokens


class EngineBook:
    """The calls of one step, and what they needed at the shared rate."""

    def __init__(
        self,
        requests: Sequence[Request],
        earlier: Mapping[str, Sequence[WorkCall]] = MappingProxyType({}),
        shared: Sequence[SharedEngine] = (),
    ) -> None:
        """``earlier``: calls of earlier steps, which help to judge an engine that has few.

        ``shared``: when other runs used the engines; such calls are compared with those of other times.
        """
        self._shared, self._earlier = shared, earlier
        self.calls = [call for request in requests for call in calls_of(request) if call.work_s > 0]
        self.knows_tokens = any(call.tokens for call in self.calls)
        self._num_requests = len(requests)
        self._by_engine: dict[str, list[WorkCall]] = defaultdict(list)
        for call in sorted(self.calls, key=lambda call: call.begin_s):
            self._by_engine[self._place_of(call)].append(call)
        here = {name: list(own) for name, own in self._by_engine.items() if name not in (SHARED, "")}
        for name in earlier if SHARED in self._by_engine else self._by_engine.keys() & earlier.keys():
            own = self._by_engine[name]
            own[:0] = earlier[name][len(own) - _FEW_CALLS :] if len(own) < _FEW_CALLS else ()
        self._draw(self.calls)
        slow = {name for name, score in self._scores().items() if score > SLOWER}
        self._fast = self._by_engine.keys() - slow
        if slow:
            self._draw([call for name in self._fast for call in self._by_engine[name]])
        scores = self._scores() if slow else {}
        self.slow = {name: self._slow(name, scores[name]) for name in sorted(slow) if scores[name] > SLOWER}
        silent = ((name, self._silence(name, own)) for name, own in here.items())
        self.slow |= {name: silence for name, silence in silent if silence is not None}

    def expected_s(self, call: WorkCall) -> float:
        """What ``call`` needs at the rate that the engines share."""
        return self._lines.get(call.turn, self._all).at(call.tokens)

    def beyond_s(self, call: WorkCall) -> float:
        """What ``call`` took beyond that; negative if it was faster."""
        return call.work_s - self.expected_s(call)

    def slow_place_of(self, call: WorkCall) -> str:
        """The key in ``slow`` that explains a call; "" if none does."""
        place = self._place_of(call)
        return place if place in self.slow else ""

    def is_shared(self, call: WorkCall) -> bool:
        """Whether other runs used its engine meanwhile."""
        spans = [(each.begin_s, each.end_s) for each in self._shared if call.engine in each.engines]
        return covered_within(spans, call.begin_s, call.end_s) > _HALF * (call.end_s - call.begin_s)

    def _place_of(self, call: WorkCall) -> str:
        return SHARED if self._shared and self.is_shared(call) else call.engine

    @property
    def s_per_token(self) -> float | None:
        """Mean seconds of work per sampled token at all engines; None if tokens are not recorded."""
        tokens = sum(call.tokens for call in self.calls)
        return sum(call.work_s for call in self.calls if call.tokens) / tokens if tokens else None

    def _draw(self, calls: Sequence[WorkCall]) -> None:
        by_turn: dict[int, list[WorkCall]] = defaultdict(list)
        for call in calls:
            by_turn[call.turn].append(call)
        usual = max(_MIN_FOR_LINE, _HALF * self._num_requests * len(calls) / max(1, len(self.calls)))
        self._all = _line(calls)
        self._lines = {turn: _line(own) for turn, own in by_turn.items() if len(own) >= usual}

    def _scores(self) -> dict[str, float]:
        """How many times as long as at the faster half of the engines the calls of each engine take, or its last ones.

        The last ones are compared with the last ones: an engine may slow down. Empty with fewer than two engines.
        """
        known = {name: own for name, own in self._by_engine.items() if name and len(own) >= _MIN_CALLS}
        if len(known) < 2:
            return {}
        whole = {name: self._factor(own) for name, own in known.items()}
        late = {name: self._factor(_last_of(own)) for name, own in known.items()}
        usual, usual_late = _usual(whole.values()), _usual(late.values())
        return {name: max(whole[name] / usual, late[name] / usual_late) for name in known}

    def _factor(self, own: Sequence[WorkCall]) -> float:
        """How many times as long as expected most of the calls took; 1.0 if only a few of them were slow."""
        by_excess = sorted(own, key=self.beyond_s)
        kept = by_excess[: len(own) - max(1, round(_TRIMMED * len(own)))]
        needed = sum(map(self.expected_s, kept))
        if needed <= 0:
            return 1.0
        factor = sum(call.work_s for call in kept) / needed
        slow = [call for call in kept if call.work_s > _SLOWER_CALL * self.expected_s(call)]
        is_of_one = len({call.request for call in slow}) < 2
        return factor if factor < 1 or (sum(map(self.expected_s, slow)) >= _MOST * needed and not is_of_one) else 1.0

    def _slow(self, name: str, factor: float) -> SlowEngine:
        own = self._by_engine[name]
        others = [call for other in self._fast for call in self._by_engine[other]]
        beyond_s = median(list(map(self.beyond_s, own)))
        first = self._factor(own[: len(_last_of(own))])
        grew = self._factor(_last_of(own)) / first if first > 0 else 1.0
        cause, part, mine, usual = _slower_part(own, others, _fixed_s(self._slow_calls(own)))
        if name == SHARED:
            cause = "shared_engines"
        return SlowEngine(cause, part, mine, usual, factor, beyond_s, grew)

    def _slow_calls(self, own: Sequence[WorkCall]) -> list[tuple[WorkCall, float]]:
        """The calls that took longer than expected, with the seconds beyond."""
        return [
            (call, call.work_s - need) for call in own if call.work_s > _SLOWER_CALL * (need := self.expected_s(call))
        ]

    def _silence(self, name: str, own: Sequence[WorkCall]) -> SlowEngine | None:
        """The engine as one that was silent once: all its open calls took the same seconds longer."""
        all_slow = self._slow_calls(own)
        beyond_s = median([beyond for _, beyond in all_slow])
        slow = [(call, beyond) for call, beyond in all_slow if beyond > _HALF * beyond_s]
        is_alike = median([abs(beyond - beyond_s) for _, beyond in slow]) < _ALIKE * beyond_s
        is_fixed = (is_alike and len(slow) < _MOST_SLOW * len(own)) or _fixed_s(all_slow) > 0
        num_requests, of = len({call.request for call, _ in slow}), len({call.request for call in own})
        is_long = beyond_s >= _HALF * median([call.work_s - beyond for call, beyond in slow])
        is_explained = name in self.slow and own[0].network_s is not None and self.slow[name].part != "decode"
        if not (is_fixed and is_long) or num_requests < max(2.0, _SILENT_SHARE * of) or is_explained:
            return None
        begins, ends = sorted(call.begin_s for call, _ in slow), sorted(call.end_s for call, _ in slow)
        open_s = percentile(ends, 100 * _TRIMMED) - percentile(begins, 100 - 100 * _TRIMMED)
        before = list(map(self.beyond_s, self._earlier.get(name, ())[-_FEW_CALLS:]))
        if open_s < _TOGETHER * beyond_s or median(before) >= _HALF * beyond_s:
            return None
        return SlowEngine("stalled_engine", "", beyond_s, 0.0, 1.0, beyond_s, 1.0)


def _fixed_s(slow: Sequence[tuple[WorkCall, float]]) -> float:
    """What slow calls take longer, if these are fixed seconds rather than a factor; else 0.0."""
    beyond_s = median([beyond for _, beyond in slow])
    factor = median([call.work_s / (call.work_s - beyond) for call, beyond in slow if call.work_s > beyond])
    fixed = median([abs(beyond - beyond_s) for _, beyond in slow])
    by_factor = median([abs(call.work_s - factor * (call.work_s - beyond)) for call, beyond in slow])
    return beyond_s if fixed < _FIXED * by_factor else 0.0


def _last_of(own: Sequence[WorkCall]) -> Sequence[WorkCall]:
    return own[-max(_MIN_CALLS, round(_LATE * len(own))) :]


def _usual(factors: Iterable[float]) -> float:
    """The median of the faster half of engines."""
    ordered = sorted(factors)
    return median(ordered[: (len(ordered) + 1) // 2]) or 1.0


def _slower_part(own: Sequence[WorkCall], others: Sequence[WorkCall], fixed_s: float) -> tuple[str, str, float, float]:
    """Cause and part, with the medians of the engine and of others. ``fixed_s``: what each call takes longer, if so."""
    found: list[tuple[float, str, float, float]] = []
    tokens = median([float(call.tokens) for call in own])
    for part, value in PARTS.items():
        mine, usual = known(own, value), known(others, value)
        if mine and usual:
            here, there = median(mine), median(usual)
            found.append(((here - there) * (tokens if part == "decode" else 1.0), part, here, there))
    if not found:
        if fixed_s:
            base_s = _line(others).base_s
            return "network", "engine", base_s + fixed_s, base_s
        here, there = (median([call.work_s / max(1, call.tokens) for call in calls]) for calls in (own, others))
        return "slow_engine", "", here, there
    _, part, here, there = max(found)
    is_cold = part == "prefill" and cached_share(others) - cached_share(own) > _COLDER
    return "network" if part == "engine" else "cold_cache" if is_cold else "slow_engine", part, here, there


PARTS: dict[str, Callable[[WorkCall], float | None]] = {
    "decode": lambda call: None if call.decode_s is None or not call.tokens else call.decode_s / call.tokens,
    "prefill": lambda call: call.prefill_s,
    "engine": lambda call: call.network_s,
}
"""Parts of a call that engines report, by phase: seconds per token, or per call."""


def known(calls: Iterable[WorkCall], value: Callable[[WorkCall], float | None]) -> list[float]:
    """The values of ``calls`` that were reported."""
    return [found for call in calls if (found := value(call)) is not None]


def cached_share(calls: Sequence[WorkCall]) -> float:
    """The share of their prompt tokens that was in the cache."""
    prompt = sum(call.prompt for call in calls)
    return sum(call.cached for call in calls) / prompt if prompt else 0.0


def _line(calls: Sequence[WorkCall]) -> _Line:
    with_tokens = [call for call in calls if call.tokens]
    if not with_tokens:
        return _Line(median([call.work_s for call in calls]))
    decoding = [call.decode_s / call.tokens for call in with_tokens if call.decode_s is not None]
    if len(decoding) < _HALF * len(with_tokens):
        return _Line(*resistant_line([(float(call.tokens), call.work_s) for call in with_tokens]))
    s_per_token = median(decoding)
    base_s = median([call.work_s - s_per_token * call.tokens for call in with_tokens])
    return _Line(max(0.0, base_s), s_per_token)


def calls_of(request: Request) -> list[WorkCall]:
    """One call for each turn outside failed attempts; for a request without turns, one for all its tokens."""
    if not request.turns:
        whole = TurnTimes(0, request.begin_s, request.end_s, request.phases, request.worker)
        whole.prompt_tokens, whole.cached_tokens = request.prompt_tokens, request.cached_tokens
        whole.sampled_tokens = request.sampled_tokens
        return [_call(whole, request)]
    failed = [(each.begin_s, each.end_s) for each in request.failed]
    turns = [each for each in request.turns if not any(begin <= each.begin_s < end for begin, end in failed)]
    return [_call(turn, request) for turn in turns]


def _call(turn: TurnTimes, request: Request) -> WorkCall:
    phases = turn.phases
    decode_s, prefill_s, outside_s = phases.get("decode"), phases.get("prefill"), phases.get("engine", 0.0)
    work_s = outside_s + (decode_s or 0.0) + (prefill_s or 0.0)
    is_reported = decode_s is not None or prefill_s is not None
    if not is_reported and turn.engine_s is not None:  # a total, without its parts
        is_reported, decode_s, outside_s = True, turn.engine_s, max(0.0, outside_s - turn.engine_s)
    return WorkCall(
        turn.engine or request.worker,
        request.request_id,
        turn.number,
        turn.begin_s,
        turn.end_s,
        turn.sampled_tokens,
        turn.prompt_tokens,
        turn.cached_tokens,
        work_s,
        phases.get("engine_queue", 0.0),
        decode_s,
        prefill_s,
        outside_s if is_reported else None,
    )
