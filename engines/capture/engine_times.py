"""Timings that an engine reports for one call: time in the queue, in prefill and in decode.

The engine's clock differs from ours, so only differences of its timestamps are used, laid out backwards from the end
of the call. Unreported times are never estimated.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

PHASES = (("decode", "decode_s"), ("prefill", "prefill_s"), ("engine_queue", "queue_s"))
"""Phases of a call from its end backwards, and the ``engine_times`` key of each."""
SECOND_NS = 1_000_000_000

Times = dict[str, float]
"""``queue_s``, ``prefill_s``, ``decode_s``, ``total_s``, ``cached_tokens``; unknown values are missing."""


def engine_times(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> Times:
    """Timings of one choice of a whole reply: from SGLang's ``meta_info``, otherwise vLLM's ``metrics``."""
    info, metrics = _numbers(choice.get("meta_info")), _numbers(reply.get("metrics"))
    known = {**_vllm(metrics), **_sglang(info)}
    cached = info.get("cached_tokens", cached_tokens(reply.get("usage")))
    return _sound({**known, "cached_tokens": cached})


def stream_times(usage: object, metrics: object, first_token_s: float | None, ended_s: float) -> Times:
    """Timings from the last chunks of a stream. Decode time runs from the first token to the end."""
    decode_s = None if first_token_s is None else ended_s - first_token_s
    return _sound({"decode_s": decode_s, **_vllm(_numbers(metrics)), "cached_tokens": cached_tokens(usage)})


def cached_tokens(usage: object) -> float | None:
    """Number of prompt tokens found in the engine's cache, if it reports that."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    return _numbers(details).get("cached_tokens")


def summed(first: Times, rest: Times) -> Times:
    """Timings of a turn made of two calls: the sums, with the cached tokens of the first call."""
    both = {name: first.get(name, 0.0) + rest.get(name, 0.0) for name in {**first, **rest}}
    cached = first.get("cached_tokens", rest.get("cached_tokens"))
    return both if cached is None else {**both, "cached_tokens": cached}


def longest(choices: Iterable[Times]) -> Times:
    """Timings of a call, given its choices': those of the choice that took longest."""
    return max(choices, key=lambda times: times.get("total_s", 0.0), default={})


def laid_back(times: Times, began_ns: int, ended_ns: int) -> list[tuple[str, int, int]]:
    """``(phase, begin, duration)`` of a call's phases, in nanoseconds, laid out backwards from its end.

    Phases are clipped to the call. Those earlier than an unknown phase are omitted, because their position is unknown.
    """
    parts: list[tuple[str, int, int]] = []
    end_ns = ended_ns
    for phase, name in PHASES:
        if name not in times:
            break
        begin_ns = max(began_ns, end_ns - round(times[name] * SECOND_NS))
        if begin_ns < end_ns:
            parts.append((phase, begin_ns, end_ns - begin_ns))
        end_ns = begin_ns
    return parts


def _sglang(info: Mapping[str, float]) -> dict[str, float | None]:
    total_s = info.get("e2e_latency")
    decode_s = _between(info, "prefill_finished_time", "request_finished_ts")
    if decode_s is None and total_s is not None and "first_token_latency" in info:
        decode_s = total_s - info["first_token_latency"]
    known = {
        "total_s": total_s,
        "queue_s": info.get("queue_time"),
        "prefill_s": _between(info, "forward_entry_time", "prefill_finished_time"),
        "decode_s": decode_s,
    }
    return {name: value for name, value in known.items() if value is not None}


def _vllm(metrics: Mapping[str, float]) -> dict[str, float | None]:
    names = {"queue_s": "queue_time_ms", "prefill_s": "time_to_first_token_ms", "decode_s": "generation_time_ms"}
    return {ours: metrics[theirs] / 1_000 for ours, theirs in names.items() if theirs in metrics}


def _between(info: Mapping[str, float], first: str, last: str) -> float | None:
    return info[last] - info[first] if first in info and last in info else None


def _numbers(given: object) -> dict[str, float]:
    # An engine may send anything.
    if not isinstance(given, Mapping):
        return {}
    return {name: value for name, value in given.items() if type(value) in (int, float) and abs(value) < 1e12}


def _sound(times: Mapping[str, float | None]) -> Times:
    # Clocks of an engine's processes differ slightly, so a negative difference counts as 0.
    return {name: max(0.0, value) for name, value in times.items() if value is not None and math.isfinite(value)}
