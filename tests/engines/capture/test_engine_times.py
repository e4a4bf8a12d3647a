"""What engines tell of their time, as turns keep it, and where a call's parts lie."""

from typing import Any

import pytest

from forebay.engines.capture.engine_times import laid_back, longest
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.read_stream import StreamReader
from forebay.engines.capture.turn import merge
from tests.engines.capture.kit import make_turn

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}]}
ALWAYS = {"e2e_latency": 2.0, "cached_tokens": 30, "prompt_tokens": 40}
METRICS = {
    "queue_time": 0.25,
    "forward_entry_time": 1_700_000_000.25,
    "prefill_finished_time": 1_700_000_000.75,
    "first_token_latency": 0.8,
    "request_finished_ts": 1_700_000_001.75,
    "decode_throughput": 9.0,
}
S = 1_000_000_000


def told(meta_info: object = None, **fields: Any) -> dict[str, float]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    reply = {"choices": [choice | ({} if meta_info is None else {"meta_info": meta_info})], **fields}
    (turn,) = turns_of_chat(BODY, reply)
    return turn.engine


def test_sglang_tells_the_whole_and_the_cache_always() -> None:
    assert told(ALWAYS) == {"total_s": 2.0, "cached_tokens": 30}


def test_sglang_with_metrics_tells_queue_prefill_and_decode() -> None:
    expected = {"total_s": 2.0, "queue_s": 0.25, "prefill_s": 0.5, "decode_s": 1.0, "cached_tokens": 30}
    assert told(ALWAYS | METRICS) == pytest.approx(expected)


def test_sglang_without_its_moments_tells_the_first_token() -> None:
    assert told(ALWAYS | {"first_token_latency": 0.5})["decode_s"] == 1.5


def test_vllm_tells_milliseconds_and_the_cache_in_its_usage() -> None:
    metrics = {"time_to_first_token_ms": 85.0, "generation_time_ms": 1_240.0, "queue_time_ms": 12.0}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    expected = {"queue_s": 0.012, "prefill_s": 0.085, "decode_s": 1.24, "cached_tokens": 4}
    assert told(metrics=metrics, usage=usage) == pytest.approx(expected)


@pytest.mark.parametrize("junk", [[], "no", {"queue_time": "1"}, {"queue_time": None}, {"e2e_latency": True}])
def test_what_is_no_number_is_not_told(junk: object) -> None:
    assert told(junk, metrics=junk) == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_numbers_without_sense_are_not_told(value: float) -> None:
    assert told({"queue_time": value}) == {}


def test_clocks_that_differ_make_nothing_negative() -> None:
    assert told({"forward_entry_time": 10.0, "prefill_finished_time": 9.9})["prefill_s"] == 0.0


def test_a_stream_tells_its_first_token_and_its_last_chunks() -> None:
    reader = StreamReader(BODY)
    reader.feed({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]})
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    reader.feed({"choices": [], "usage": usage})
    first_s = reader.turns()[0].first_token_s
    assert first_s is not None
    (turn,) = reader.turns(ended_s=first_s + 3)
    assert turn.engine == pytest.approx({"decode_s": 3.0, "cached_tokens": 8})


def test_a_stream_takes_the_engines_word_before_ours() -> None:
    reader = StreamReader(BODY)
    reader.feed({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]})
    reader.feed({"choices": [], "metrics": {"generation_time_ms": 500, "queue_time_ms": 250}})
    assert reader.turns(ended_s=2e9)[0].engine == {"decode_s": 0.5, "queue_s": 0.25}


def test_a_turn_in_parts_adds_up_and_keeps_the_cache_of_its_first() -> None:
    first = make_turn([1], [2], engine={"total_s": 1.0, "queue_s": 0.5, "cached_tokens": 0}, finish_reason="abort")
    rest = make_turn([1, 2], [3], engine={"total_s": 2.0, "decode_s": 1.5, "cached_tokens": 2})
    assert merge(first, rest).engine == {"total_s": 3.0, "queue_s": 0.5, "decode_s": 1.5, "cached_tokens": 0}


def test_parts_lie_back_to_back_before_the_end_of_the_call() -> None:
    times = {"total_s": 2.0, "queue_s": 0.25, "prefill_s": 0.5, "decode_s": 1.0}
    parts = [("decode", 9 * S, S), ("prefill", 8 * S + S // 2, S // 2), ("engine_queue", 8 * S + S // 4, S // 4)]
    assert laid_back(times, 7 * S, 10 * S) == parts


def test_parts_never_begin_before_their_call() -> None:
    assert laid_back({"decode_s": 5.0, "prefill_s": 5.0}, 7 * S, 10 * S) == [("decode", 7 * S, 3 * S)]


def test_a_part_before_one_that_is_not_known_has_no_place() -> None:
    assert laid_back({"total_s": 2.0, "queue_s": 0.25}, 7 * S, 10 * S) == []
    assert laid_back({"decode_s": 1.0, "queue_s": 0.25}, 7 * S, 10 * S) == [("decode", 9 * S, S)]


def test_of_several_choices_the_one_that_ended_last_counts() -> None:
    assert longest([{"total_s": 1.0}, {"total_s": 3.0}, {}]) == {"total_s": 3.0}
    assert longest([]) == {}
