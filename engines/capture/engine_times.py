"""What an engine tells of one call's time: how long it stood in the queue, was read, and was generated.

An engine's clock is another than ours: only differences of its moments are used, and laid back from the end of the
call. Where an engine tells nothing, nothing is guessed.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

PHASES = (("decode", "decode_s"), ("prefill", "prefill_s"), ("engine_queue", "queue_s"))
"""The parts of a call from its end backwards, and what ``engine_times`` calls their seconds."""
SECOND_NS = 1_000_000_000

Times = dict[str, float]
"""``queue_s``, ``prefill_s``, ``decode_s``, ``total_s`` (all of it), ``cached_tokens``; what is not known is not there.
"""


def engine_times(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> Times:
    """What a whole reply tells of one of its choices: SGLang's ``meta_info``, else vLLM's ``metrics``."""
    info, metrics = _numbers(choice.get("meta_info")), _numbers(reply.get("metrics"))
    known = {**_vllm(metrics), **_sglang(info)}
    cached = info.get("cached_tokens", cached_tokens(reply.get("usage")))
    return _sound({**known, "cached_tokens": cached})


def stream_times(usage: object, metrics: object, first_token_s: float | None, ended_s: float) -> Times:
    """What the last chunks of a stream tell, and when its first token came: from then on it was generated."""
    decode_s = None if first_token_s is None else ended_s - first_token_s
    return _sound({"decode_s": decode_s, **_vllm(_numbers(metrics)), "cached_tokens": cached_tokens(usage)})


def cached_tokens(usage: object) -> float | None:
    """How much of the prompt the engine had in its cache, if it counts that."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    return _numbers(details).get("cached_tokens")


def summed(first: Times, rest: Times) -> Times:
    """The times of a turn that two calls have brought. The prompt's cache was that of the first one."""
    both = {name: first.get(name, 0.0) + rest.get(name, 0.0) for name in {**first, **rest}}
    cached = first.get("cached_tokens", rest.get("cached_tokens"))
    return both if cached is None else {**both, "cached_tokens": cached}


def longest(choices: Iterable[Times]) -> Times:
    """Those of a call, given those of its choices: the one that ended last."""
    return max(choices, key=lambda times: times.get("total_s", 0.0), default={})


def laid_back(times: Times, began_ns: int, ended_ns: int) -> list[tuple[str, int, int]]:
    """``(phase, begin, duration)`` of the parts of a call, in nanoseconds, from its end backwards and within it.

    What stands before a part that is not known has no place, and is left out.
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
    # An engine may tell anything.
    if not isinstance(given, Mapping):
        return {}
    return {name: value for name, value in given.items() if type(value) in (int, float) and abs(value) < 1e12}


def _sound(times: Mapping[str, float | None]) -> Times:
    # Clocks of an engine's processes differ a little: what comes out below zero is nothing.
    return {name: max(0.0, value) for name, value in times.items() if value is not None and math.isfinite(value)}
